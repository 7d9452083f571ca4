"""`trlx-hybrid new`: what it writes is a plugin whose own tests, lint and types pass at once."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from trlx_hybrid.commands import new as scaffold
from trlx_hybrid.commands.main import main
from trlx_hybrid.errors import ConfigError

KINDS = sorted(scaffold.KINDS)
LONG = "a_name_that_fills_lines"


def run(*command: object, cwd: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRLX_HYBRID_DISABLE": ""}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plugin of each kind."""
    folder = tmp_path_factory.mktemp("new")
    for kind in KINDS:
        scaffold.write(f"{LONG}_{kind}", kind, folder / kind)
    return folder


def test_the_command_writes_one_and_says_what_is_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "length-bonus", "--kind", "advantages"]) == 0
    assert "next: cd trlx-length-bonus && pip install -e '.[test]' && pytest" in capsys.readouterr().out
    assert (tmp_path / "trlx-length-bonus" / "src" / "trlx_length_bonus" / "plugin.py").exists()
    assert main(["new", "length-bonus", "--kind", "hook"]) == 1
    assert "trlx-length-bonus is not empty. Choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hybrid", "hybrid-vllm", "vllm", "alias", "auto", "transformers", "multiturn"])
def test_a_name_that_something_else_has_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="is the name of something else already"):
        scaffold.write(name, "engine", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_folder_with_a_space_is_quoted_in_what_to_do_next(tmp_path, capsys):
    assert main(["new", "length_bonus", "--kind", "hook", "--to", str(tmp_path / "a b")]) == 0
    assert f"next: cd '{tmp_path}/a b' && pip" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["2fast", "class", "Upper", "a__b", "a b", ""])
def test_a_name_that_no_package_can_have_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="cannot name a plugin"):
        scaffold.write(name, "hook", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_lint_and_types_pass_at_once(plugins):
    for kind in KINDS:
        run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=plugins / kind)
        run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".", cwd=plugins / kind)
    packages = [f"trlx_{LONG}_{kind}" for kind in KINDS]
    (plugins / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nmypy_path = " + ":".join(str(plugins / kind / "src") for kind in KINDS) + "\n"
        "[mypy-datasets.*,transformers.*,trl.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    arguments = [argument for package in packages for argument in ("-p", package)]
    run(sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *arguments, cwd=plugins)


@pytest.mark.slow
def test_each_kind_builds_installs_passes_its_tests_and_trains(plugins, tmp_path):
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated")
    folders = [plugins / kind for kind in KINDS]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, *folders, cwd=tmp_path)
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    here = sysconfig.get_path("purelib")  # addsitedir, not a bare path: editable installs are .pth files themselves
    Path(purelib, "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    wheels = sorted(tmp_path.glob("*.whl"))
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", *wheels, cwd=tmp_path)
    listed = run(python, "-m", "trlx_hybrid", "plugins", cwd=tmp_path)
    assert all(f"{LONG}_{kind}  trlx-" in listed for kind in KINDS)
    tests = tmp_path / "tests"
    tests.mkdir()
    for kind in KINDS:
        for file in (plugins / kind / "tests").glob("*.py"):
            (tests / file.name).write_text(file.read_text())
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    assert " passed" in out
    assert "skipped" not in out
