"""The plugin of the page as a third party would ship it: built, installed elsewhere, and seen at work."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from trlx_hybrid.testing.processes import start_ranks, wait_all

ROOT = Path(__file__).parents[1]
PLUGIN_PAGE = ROOT / "docs" / "plugins.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRLX_HYBRID_DISABLE": ""}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def installed(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The interpreter of an environment that has the wheel of the page's files on top of what is installed here."""
    return made_once("hello", install) / "env" / "bin" / "python"


def install(folder: Path) -> None:
    example = folder / "as on the page"
    for title, source in re.findall(r'title="(.*?)"\n--8<-- "(.*?)"\n', PLUGIN_PAGE.read_text()):
        (example / title).parent.mkdir(parents=True, exist_ok=True)
        (example / title).write_text((ROOT / source).read_text())
    (example / "src" / "trlx_hello" / "__init__.py").touch()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, example, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    here = sysconfig.get_path("purelib")  # addsitedir, not a bare path: editable installs are .pth files themselves
    Path(purelib, "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)


def test_listed(installed: Path, tmp_path: Path) -> None:
    report = json.loads(run(installed, "-m", "trlx_hybrid", "plugins", "--json", cwd=tmp_path).stdout)
    (hello,) = [plugin for plugin in report["plugins"] if plugin["name"] == "hello"]
    assert hello == {
        "name": "hello",
        "distribution": "trlx-hello",
        "version": "0.1.0",
        "hooks": ["trlx_report_header", "trlx_rollout_end"],
    }


def test_not_installed_here() -> None:
    from importlib.metadata import entry_points

    assert "hello" not in {entry_point.name for entry_point in entry_points(group="trlx_hybrid")}


TWO_RANKS = """
import sys
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model

sys.path.insert(0, sys.argv[2])
from trlx_hello import plugin

args = GRPOConfig(**tiny_grpo(sys.argv[1], use_vllm=False, per_device_train_batch_size=4, max_steps=2))
trainer = GRPOTrainer(
    model=tiny_model(),
    args=args,
    reward_funcs=lambda completions, **columns: [1.0] * len(completions),
    train_dataset=sorting_prompts(),
    processing_class=character_tokenizer(),
    plugins=[plugin],
)
trainer.train()
"""


def test_two_ranks_say_it_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_RANKS)
    source = ROOT / "examples" / "plugin_hello" / "src"
    here = os.environ | {"ACCELERATE_USE_CPU": "true"}
    started = start_ranks(tmp_path / "train.py", tmp_path / "out", source, count=2, environment=here)
    first, second = wait_all(started, 200)
    assert first.returncode == second.returncode == 0, first.stderr[-3000:] + second.stderr[-3000:]
    assert "hello: watching 2 rank(s)" in first.stderr
    assert "hello:" not in second.stdout + second.stderr
    said = re.findall(r"hello: (\d+) trajectories, (\d+) tokens, reward (\S+)", first.stdout)
    assert [(rows, reward) for rows, _, reward in said] == [("8", "1.000")] * 2


@pytest.mark.slow
def test_takes_part_in_the_first_run_of_the_quickstart(installed: Path, tmp_path: Path) -> None:
    (script, *_) = re.findall(r"<!-- runnable -->\n```python\n(.*?)\n```", QUICKSTART.read_text(), re.DOTALL)
    done = run(installed, "-c", script, cwd=tmp_path)
    header, *below = re.findall(r"(?:trlx_hybrid 0|hello:).*", done.stderr)
    assert "hello 0.1.0" in header
    assert "engine=transformers (default): generation is TRL's own" in header
    assert below == ["hello: watching 1 rank(s)"]
    (tokens, reward), *more = re.findall(r"hello: 4 trajectories, (\d+) tokens, reward (\S+)", done.stdout)
    assert not more
    assert int(tokens) == 4 * logged("completions/mean_length", done)
    assert float(reward) == pytest.approx(logged("reward", done), abs=1e-3)


def logged(metric: str, done: subprocess.CompletedProcess) -> float:
    """What TRL reports of the same rollout."""
    (value,) = re.findall(rf"'{metric}': '?([\d.e-]+)", done.stdout + done.stderr)
    return float(value)
