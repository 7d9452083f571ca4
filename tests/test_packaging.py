"""The distributions: they build, hold what they should, fit together, and work where only they are installed."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]
PROJECTS = {folder: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS}
CORE = PROJECTS[ROOT]


def run(*command: object, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A folder with an sdist of each distribution, and the wheel that is built from the sdist."""
    return made_once("built", build)


def build(folder: Path) -> None:
    for project in FOLDERS:
        run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=project)
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as opened:
            opened.extractall(folder / "unpacked", filter="data")
    for unpacked in (folder / "unpacked").iterdir():
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=unpacked)


def requirements(project: dict) -> list[Requirement]:
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    return [Requirement(line) for line in [*project.get("dependencies", ()), *extras]]


def test_all_have_one_version_and_take_the_core_of_that_minor():
    assert len({project["version"] for project in PROJECTS.values()}) == 1
    version = Version(CORE["version"])
    later = f"{version.major}.{version.minor + 1}.0"
    for project in list(PROJECTS.values())[1:]:
        (core,) = [r for r in requirements(project) if r.name == "trlx-hybrid"]
        assert core.specifier.contains(str(version))
        assert not core.specifier.contains(later)


def test_every_plugin_is_an_extra_and_every_extra_leads_to_a_plugin():
    names = {project["name"]: project for project in PROJECTS.values()}
    named = [Requirement(line) for lines in CORE["optional-dependencies"].values() for line in lines]
    assert {r.name for r in named} == names.keys() - {"trlx-hybrid"}
    for requirement in named:
        assert requirement.extras <= names[requirement.name].get("optional-dependencies", {}).keys()
    assert {Requirement(line).name for line in CORE["optional-dependencies"]["all"]} == {r.name for r in named}
    assert "cuda" in Requirement(CORE["optional-dependencies"]["vllm"][0]).extras  # the engine comes with it


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name if folder != ROOT else "trlx-hybrid")
def test_a_wheel_holds_its_package_and_a_licence_and_nothing_else(built, folder):
    project = PROJECTS[folder]
    package = project["name"].replace("-", "_")
    (wheel,) = built.glob(f"{package}-{project['version']}-*.whl")
    source = ROOT if folder == ROOT else folder / "src"
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", package, cwd=source).splitlines()
    assert tracked
    with zipfile.ZipFile(wheel) as opened:
        found = set(opened.namelist())
        (metadata,) = [opened.read(name).decode() for name in found if name.endswith("/METADATA")]
    info = {name for name in found if ".dist-info/" in name}
    assert found - info == set(tracked)
    assert f"{package}/py.typed" in found
    assert any(name.endswith("/licenses/LICENSE") for name in info)
    assert "License-Expression: Apache-2.0" in metadata
    assert len(metadata.partition("\n\n")[2]) > 200  # the page that an index shows


@pytest.mark.slow
def test_a_run_where_only_the_wheels_are_installed(built, tmp_path):
    """Beside what they require; from a folder that is not the checkout."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    here = Path(sysconfig.get_path("purelib"))
    (purelib / "outer.pth").write_text(f"{here}\n")  # a bare path: editable installs there are not followed
    wheels = sorted(built.glob("*.whl"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", *wheels, cwd=tmp_path)
    listed = run(tmp_path / "env" / "bin" / "trlx-hybrid", "plugins", cwd=tmp_path)
    for project in list(PROJECTS.values())[1:]:
        assert re.search(rf"^{project['name'].rpartition('-')[2]}  {project['name']} ", listed, re.MULTILINE)
    script = tmp_path / "train.py"
    script.write_text(
        "import trlx_hybrid, trlx_hybrid_vllm\n"
        "from trl import GRPOConfig\n"
        "from trlx_hybrid import GRPOTrainer, HybridConfig\n"
        "from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model\n"
        "if __name__ == '__main__':\n"
        "    trainer = GRPOTrainer(\n"
        "        model=tiny_model(), processing_class=character_tokenizer(), train_dataset=sorting_prompts(),\n"
        "        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],\n"
        "        args=GRPOConfig(**tiny_grpo('run')),\n"
        "        hybrid=HybridConfig(scoring='packed', algorithm=['dynamic_sampling']),\n"
        "    )\n"
        "    trainer.train()\n"
        "    print(trainer.state.global_step, trlx_hybrid.__file__, trlx_hybrid_vllm.__file__)\n"
    )
    steps, *files = run(python, script, cwd=tmp_path).split()[-3:]
    assert steps == "3"
    assert all(Path(file).is_relative_to(purelib) for file in files)
