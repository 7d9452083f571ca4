"""Pages that are done as they are told: each file is written and each command run, in the order of the page."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'^(?:python|yaml) title="(.*?)"$')


def steps(name: str) -> list[tuple[str, str]]:
    """A page's files by name, and "" with its commands, in order."""
    found = [(info and TITLE.match(info), info, block) for info, block in BLOCK.findall((DOCS / name).read_text())]
    return [(title[1] if title else "", block) for title, info, block in found if title or not info]


@pytest.fixture
def done(tmp_path: Path, record_property: Callable[[str, object], None]) -> Callable[[str], dict[str, str]]:
    """Does a tutorial in an empty folder; returns what each command printed."""

    def do(name: str) -> dict[str, str]:
        text = (DOCS / name).read_text()
        here = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        here.pop("PYTHONUNBUFFERED", None)  # it writes line and newline apart, and two ranks may then share a line
        here["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        printed, began = {}, time.monotonic()
        for title, block in steps(name):
            if title:
                (tmp_path / title).write_text(f"{block}\n")
                continue
            for command in block.splitlines():
                command = command.replace("trlx-hybrid new", f"{sys.executable} -m trlx_hybrid new")
                command = command.replace("torchrun ", f"{sys.executable} -m torch.distributed.run ")
                command = command.replace("accelerate ", f"{sys.executable} -m accelerate.commands.accelerate_cli ")
                ended = subprocess.run(
                    ["bash", "-c", command], cwd=tmp_path, env=here, capture_output=True, text=True, timeout=300
                )
                assert ended.returncode == 0, f"{command}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
                printed[command] = ended.stdout + ended.stderr
        (said,) = re.findall(r"The commands take (.*?) on two CPU cores", " ".join(text.split()))
        took = time.monotonic() - began
        record_property("minutes", took / 60)
        print(f"{name}: the commands took {took / 60:.1f} minutes; the page says {said}")
        return printed

    return do


@pytest.mark.slow
def test_from_a_script_to_an_environment(done, tmp_path):
    printed = done("tutorials/own-environment.md")
    assert "trlx_hybrid" not in printed["python train.py"]
    assert "engine=vllm (HybridConfig.engine)" in printed["python hybrid.py"]
    assert "rollout=multi_turn" in printed["python play.py"]
    (turns,) = re.findall(r"^turns of an episode: ([\d.]+)$", printed["python play.py"], re.MULTILINE)
    assert 1 < float(turns) <= 3
    assert "1 passed" in printed["python -m pytest -q test_game.py"]
    assert (tmp_path / "trlx-my-game" / "src" / "trlx_my_game" / "environment.py").exists()


@pytest.mark.slow
def test_the_first_algorithm(done, tmp_path):
    printed = done("tutorials/first-algorithm.md")
    assert "median_baseline" in printed["python train.py"]
    ((first, last),) = re.findall(r"completion: ([\d.]+) at first, ([\d.]+) at the end", printed["python train.py"])
    assert float(last) > float(first)
    assert "2 passed" in printed["python -m pytest -q test_median.py"]
    assert (tmp_path / "trlx-median-baseline" / "src" / "trlx_median_baseline" / "plugin.py").exists()


def test_the_script_of_the_second_run_differs_in_the_trainer_alone():
    blocks = dict(steps("tutorials/own-environment.md"))
    before, after = ({*blocks[name].splitlines()} for name in ("train.py", "hybrid.py"))
    changed = {line for line in after - before if "runs/" not in line}
    assert changed == {
        "from trl import GRPOConfig",
        "from trlx_hybrid import GRPOTrainer, HybridConfig",
        'hybrid = HybridConfig(engine="vllm", engine_options={"max_model_len": 1024})',
        'trainer = GRPOTrainer(model="model", args=args, reward_funcs=found, train_dataset=rows, hybrid=hybrid)',
    }


@pytest.mark.slow
def test_several_processes(done, tmp_path):
    """The two ways that start two of them, and the one that starts one although it is asked for two."""
    torchrun, accelerate = done("several-processes.md").values()
    (shown,) = re.findall(r"^```text\n(FSDP: .*)\n```$", (DOCS / "several-processes.md").read_text(), re.MULTILINE)
    for printed in (torchrun, accelerate):
        ranks = re.findall(r"rank \d of \d$", printed, re.MULTILINE)  # behind a progress bar, perhaps
        assert sorted(ranks) == ["rank 0 of 2", "rank 1 of 2"]
        assert printed.count("trlx_hybrid 0") == 1
        assert "engine=vllm (HybridConfig.engine) · weights=" in printed
    assert shown not in torchrun
    assert shown in accelerate
    alone = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([*alone, "train.py"], cwd=tmp_path, env=here, capture_output=True, text=True, timeout=300)
    assert re.findall(r"^rank \d of \d$", ended.stdout, re.MULTILINE) == ["rank 0 of 1"]
