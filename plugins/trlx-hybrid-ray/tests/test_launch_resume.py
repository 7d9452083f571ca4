"""A run that is killed, and started again by the launcher, ends as one that nobody disturbed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import SCRIPTS, Segments, launch, nothing_left, reports, without_ray
from trlx_hybrid.trl.checkpoint.checkpoints import newest_checkpoint

from tests.support.fsdp import FSDP2_FILE


class Killer(threading.Thread):
    """Kills a rank once the checkpoint of a step is whole."""

    def __init__(self, folder, step, rank):
        super().__init__(daemon=True)
        self.folder, self.checkpoint, self.mark = folder, f"checkpoint-{step}", folder / f"start.{rank}"
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(0.01):
            newest = newest_checkpoint(self.folder / "run")
            if newest is not None and newest.name == self.checkpoint:
                os.kill(json.loads(self.mark.read_text())["pid"], signal.SIGKILL)
                return


@pytest.mark.slow
def test_a_run_that_is_killed_at_a_step_ends_as_if_nothing_had_happened(two_nodes, capfd, tmp_path):
    segments = Segments()
    config = tmp_path / "accelerate.yaml"
    config.write_text(json.dumps(FSDP2_FILE))
    script, options = SCRIPTS / "launched_grpo.py", ("save=1", "steps=4", "pause=0.3")
    folders = {name: tmp_path / name for name in ("undisturbed", "killed")}
    for folder in folders.values():
        folder.mkdir()
    whole = without_ray(script, folders["undisturbed"], *options)
    killer = Killer(folders["killed"], step=2, rank=1)
    killer.start()
    settings = {"nodes": 2, "config_file": str(config), "restarts": 1}
    launched = launch(capfd, tmp_path, script, folders["killed"], *options, **settings)
    killer.over.set()
    assert launched.code == 0, launched.err[-4000:]
    assert "Rank 1 failed first" in launched.err
    assert "started again, going on from" in launched.err
    again = reports(folders["killed"])
    for rank in range(2):
        assert whole[rank]["resumed"] == 0
        assert again[rank]["resumed"] == 2
        assert again[rank]["rewards"] == whole[rank]["rewards"][2:]
        assert again[rank]["logs"] == whole[rank]["logs"]
        assert len(whole[rank]["logs"]) == 4
    assert nothing_left(str(tmp_path), segments) == []
