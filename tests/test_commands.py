"""The commands of the pages: read by the parsers of the programs that they start, and run where that is cheap."""

import argparse
import os
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
RECIPES = sorted(ROOT.glob("examples/recipes/*.yaml"))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
BLOCK = re.compile(r"^( *)```(.*?)\n(.*?)\n\1```", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(
    r"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:\.venv-\w+/bin/)?(?:pip|make|trlx-hybrid|python3?|accelerate|torchrun|ray)) "
)
INLINE = re.compile(rf"`({PROGRAM.pattern}[^`…]* --[^`…]*)`")


def commands() -> list[str]:
    """Every command of the pages, the examples' docstrings and the recipes' heads, and those in the text that have
    options."""
    heads = "".join(recipe.read_text() for recipe in RECIPES)
    found = re.findall(r"^#     (?:\$ )?((?:trlx-hybrid|accelerate) .*)$", heads, re.MULTILINE)
    for file in [*PAGES, *EXAMPLES]:
        text = file.read_text()
        blocks = (
            [textwrap.dedent(block) for _, kind, block in BLOCK.findall(text) if not kind]
            if file.suffix == ".md"
            else []
        )
        if file.suffix == ".py":
            blocks = [
                textwrap.dedent(block) for block in text.split('"""')[1].split("\n\n") if block.startswith("    ")
            ]
        for block in blocks:
            found += [line for line in block.replace("\\\n", " ").splitlines() if PROGRAM.match(line)]
        found += [match[0] for match in INLINE.findall(text)] if file.suffix == ".md" else []
    return list(dict.fromkeys(" ".join(line.removeprefix("$ ").split()) for line in found))


class Read(BaseException):
    """What a program's parser made of its arguments, before the program did anything with them."""


@pytest.fixture
def read(monkeypatch, tmp_path) -> Callable[..., Any]:
    """Starts a program up to where its parser has read these arguments; returns the namespace."""
    original = argparse.ArgumentParser.parse_known_args

    def stop(parser: Any, args: Any = None, namespace: Any = None) -> Any:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", original)  # which calls itself for commands
        options, unknown = original(parser, args, namespace)
        assert unknown == []
        raise Read(options)

    def start(program: Callable[[], object], arguments: list[str]) -> Any:
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(Read) as found:
            program()
        return found.value.args[0]

    for folder in (ROOT, ROOT / "examples"):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    Path("accelerate.yaml").touch()
    Path("places.yaml").write_text("trainer: {replicas: 2, size: 8, gpus: 1}")
    page = (ROOT / "docs/configuration.md").read_text()
    (script,) = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", page, re.DOTALL)
    Path("train.py").write_text(script)
    Path("run.yaml").write_text(textwrap.dedent(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]))
    return start


def check_pip(words: list[str], read: Any) -> None:
    """Folders are packages and have the extras; files of requirements are there."""
    assert words[0] in ("install", "uninstall")
    for word in words[1:]:
        path, _, extras = word.removesuffix("]").partition("[")
        if path.endswith(".lock"):
            assert (ROOT / path).is_file()
        elif path.startswith((".", "examples/")):
            project = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
            assert not extras or extras in project["optional-dependencies"]


def check_script(words: list[str], read: Any) -> None:
    """A script, `train.py` for the reader's own, knows its flags; or a page tells the reader to write it."""
    script = Path("train.py") if words[0] == "train.py" else ROOT / words[0]
    if not words[1:] and any(f'```python title="{words[0]}"' in page.read_text() for page in PAGES):
        return
    assert script.is_file()
    if words[1:]:
        assert "parse" in script.read_text()  # or all of it would run
        read(lambda: runpy.run_path(str(script), run_name="__main__"), words[1:])


def check_python(words: list[str], read: Any) -> None:
    """A module knows its flags."""
    if words[0] != "-m":
        check_script(words, read)
    elif words[1] != "venv":
        module = words[1].replace("NAME", "host")
        read(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), words[2:])


def check_accelerate(words: list[str], read: Any) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch"
    options = launch_command_parser().parse_args(words[1:])
    if options.module:
        assert options.training_script == "trlx_hybrid"
        check_hybrid(options.training_script_args, read)
    else:
        check_script([options.training_script, *options.training_script_args], read)


def check_torchrun(words: list[str], read: Any) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    check_script([options.training_script, *options.training_script_args], read)


def check_ray(words: list[str], read: Any) -> None:
    from ray.scripts.scripts import cli

    command = cli.commands[words[0]]
    if words[0] == "job":
        command, words = command.commands[words[1]], words[1:]
    context = command.make_context(words[0], words[1:])
    if words[0] == "submit":
        check(list(context.params["entrypoint"]), read)


def check_hybrid(words: list[str], read: Any) -> None:
    from trlx_hybrid.commands.main import main

    options = read(lambda: main(words), words)
    if words[0] == "train" and "--help" not in words:
        from trlx_hybrid.commands import train

        train.read(Path(options.recipe), [*options.settings, "--use_cpu"])
    if words[0] == "launch":
        from trlx_hybrid_ray.launch import job_of

        job_of(options)
        check_script([options.script, *options.arguments], read)


PROGRAMS = {
    "pip": check_pip,
    "make": lambda words, read: subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True),
    "trlx-hybrid": check_hybrid,
    "python": check_python,
    "python3": check_python,
    "accelerate": check_accelerate,
    "torchrun": check_torchrun,
    "ray": check_ray,
}


def check(words: list[str], read: Any) -> None:
    """Hold a command against the program that it starts."""
    while "=" in words[0]:
        words = words[1:]
    PROGRAMS[words[0].rpartition("/")[2]](words[1:], read)


@pytest.mark.parametrize("command", commands())
def test_a_command_is_understood(command: str, read: Any) -> None:
    shell = ["bash", "-c", f"printf '%s\\0' {command}"]  # splits and expands it
    words = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    check(words, read)


@pytest.mark.parametrize(
    ("page", "command", "elsewhere"),
    [
        ("docs/ray/launching.md", "launch", {"-h"}),
        ("docs/resharding.md", "reshard-plan", {"-h", "--model"}),
        ("docs/trajectories.md", "trajectories", {"-h"}),
        ("docs/report.md", "report", {"-h"}),
    ],
)
def test_a_table_has_the_options_of_its_command(page: str, command: str, elsewhere: set[str], capsys: Any) -> None:
    from trlx_hybrid.commands.main import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    known = set(re.findall(r"^  (--?[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    cells = " ".join(re.findall(r"^\| (`--[^|]*) \|", (ROOT / page).read_text(), re.MULTILINE))
    assert set(re.findall(r"--[\w-]+", cells)) | elsewhere == known


def test_a_script_that_parses_every_config_prints_its_help() -> None:
    from trl import GRPOConfig, ModelConfig
    from trlx_hybrid import HybridConfig, TrlParser

    assert "--max_logprob_gap" in TrlParser((GRPOConfig, ModelConfig, HybridConfig)).format_help()


@pytest.mark.parametrize("script", [e for e in EXAMPLES if "__main__" in e.read_text()], ids=lambda script: script.stem)
def test_an_example_prints_its_help_and_starts_nothing(script: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: ")


def test_no_example_writes_over_the_run_of_another(read: Any) -> None:
    folders = []
    for name in (
        "calculator",
        "coder_and_tester",
        "custom_loop",
        "guessing_game",
        "quickstart",
        "ray_remote_environment",
    ):
        script = str(ROOT / "examples" / f"{name}.py")
        folders.append(read(lambda: runpy.run_path(script, run_name="__main__"), []).output_dir)  # noqa: B023
    assert len(set(folders)) == len(folders)


QUICK = [line for line in commands() if re.match(r"trlx-hybrid (plugins|env|reshard-plan)\b", line)]


@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_runs(command: str) -> None:
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], env=os.environ | here, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES:  # what a page shows of its output
        shown = re.search(rf"^```\n\$ {re.escape(command)}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        assert not shown or set(shown[1].splitlines()) <= {*done.stdout.splitlines(), "…"}


@pytest.mark.slow
def test_the_quickstart_on_a_fresh_cpu_machine(tmp_path: Path) -> None:
    """What the page says to type, up to its first run, in an environment without anything."""
    page = (ROOT / "docs/quickstart.md").read_text()
    install = textwrap.dedent(re.search(r'=== "CPU"\n\n    ```\n(.*?)    ```', page, re.DOTALL)[1])
    (then, *_), (script, *_) = (
        re.findall(r"^```\n(.*?)```", page, re.DOTALL | re.MULTILINE),
        re.findall(r"```python\n(.*?)```", page, re.DOTALL),
    )
    (tmp_path / "first.py").write_text(script)
    venv.create(tmp_path / "env", with_pip=True)
    lines = f"set -e\n. {tmp_path}/env/bin/activate\n{install}{then}cd {tmp_path}\npython first.py"
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"PIP_NO_COMPILE": "0"}  # which switches it on, as pip says; what is imported is compiled then
    done = subprocess.run(
        ["bash", "-c", lines], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "result     no problems found" in done.stdout
    assert "plugins: vllm 0.1.0 · engine=transformers (default): generation is TRL's own" in done.stderr
