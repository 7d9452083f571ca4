"""A run that is killed, and started again by the launcher, ends as one that nobody disturbed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import SCRIPTS, Segments, launch, nothing_left
from test_launch_grpo import CONFIG, reports
from trlx_hybrid.trl.checkpoint import newest_checkpoint


class Killer(threading.Thread):
    """Kills a rank once the checkpoint of a step is whole."""

    def __init__(self, folder, step, rank):
        super().__init__(daemon=True)
        self.folder, self.checkpoint, self.mark = folder, f"checkpoint-{step}", folder / f"start.{rank}"
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.01):
            newest = newest_checkpoint(self.folder / "run", ranks=2)
            if newest is not None and newest.name == self.checkpoint:
                os.kill(json.loads(self.mark.read_text())["pid"], signal.SIGKILL)
                return


@pytest.mark.slow
def test_a_run_that_is_killed_at_a_step_ends_as_if_nothing_had_happened(two_nodes, capfd, tmp_path):
    segments = Segments()
    config = tmp_path / "accelerate.yaml"
    config.write_text(json.dumps(CONFIG))
    found = {}
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        killer = Killer(folder, step=2, rank=1)
        if name == "killed":
            killer.start()
        done = launch(
            capfd,
            tmp_path,
            SCRIPTS / "launched_grpo.py",
            folder,
            "save=1",
            "steps=4",
            "pause=0.3",
            nodes=2,
            config_file=str(config),
            restarts=1,
        )
        killer.over.set()
        assert done.code == 0, done.err[-4000:]
        found[name] = reports(folder), done.err
    (whole, said), (again, said_again) = found["undisturbed"], found["killed"]
    assert "Starting again" not in said
    assert "Rank 1 failed first" in said_again
    assert "started again, going on from" in said_again
    for rank in range(2):
        assert whole[rank]["resumed"] == 0
        assert again[rank]["resumed"] == 2
        assert again[rank]["rewards"] == whole[rank]["rewards"][2:]
        assert again[rank]["logs"] == whole[rank]["logs"]
        assert len(whole[rank]["logs"]) == 4
    assert nothing_left(str(tmp_path), segments) == []
