"""The documentation: complete, built without a warning, and never apart from the code."""

import dataclasses
import html
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from trlx_hybrid import HybridConfig
from trlx_hybrid.commands.new import KINDS
from trlx_hybrid.contract import protocols, types
from trlx_hybrid.plugins import hookspecs
from trlx_hybrid.plugins.registry import SLOTS
from trlx_hybrid.testing import conformance

from tests import api_pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
HOOKS = {name: value for name, value in vars(hookspecs).items() if name.startswith("trlx_")}
RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)\n```", re.DOTALL)
TESTS = [
    path.read_text()
    for folder in (ROOT / "tests", *ROOT.glob("plugins/*/tests"))
    for path in folder.rglob("*.py")
    if path != Path(__file__)
]


@pytest.fixture(scope="module")
def site(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return made_once("site", build)


def build(folder: Path) -> None:
    done = subprocess.run(  # never with --quiet: strict counts only the warnings that are logged
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # a notice of the theme's, not about these pages
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def section(page: str, hook: str) -> str:
    """The text of a hook's part of the built page, from its heading to the next one."""
    (_, *parts) = re.split(r'<h2 id="trlx_hybrid\.plugins\.hookspecs\.', page)
    (part,) = [p for p in parts if p.startswith(f'{hook}"')]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", part.partition(">")[2])).split())


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_on_the_page_with_its_signature_and_kind(site: Path, hook: str) -> None:
    text = section((site / "hooks" / "index.html").read_text(), hook)
    options = HOOKS[hook].trlx_hybrid_spec
    for kind in ("historic", "firstresult"):
        assert (f" {kind} " in text[: text.index("(")]) == options[kind]
    signature = inspect.signature(HOOKS[hook])
    shown = re.sub(r"\s", "", text)
    for parameter in signature.parameters.values():
        assert re.sub(r"\s", "", str(parameter)).replace("'", "") in shown
    assert f"->{signature.return_annotation}".replace(" ", "") in shown


@pytest.mark.parametrize("module", [hookspecs, protocols, types], ids=lambda module: module.__name__)
def test_every_type_that_authors_of_plugins_meet_has_an_entry(site: Path, module: ModuleType) -> None:
    pages = "".join((site / page / "index.html").read_text() for page in ("reference", "configuration"))
    imports = re.findall(r"from \.+[\w.]+ import ([\w, ]+)", inspect.getsource(module))
    names = {name.strip() for names in imports for name in names.split(",")}
    missing = [n for n in names if n[0].isupper() and not re.search(rf'id="trlx_hybrid\.[\w.]*\b{n}"', pages)]
    assert not missing


def test_no_hook_on_the_page_that_is_not_in_the_specs(site: Path) -> None:
    page = (site / "hooks" / "index.html").read_text()
    assert set(re.findall(r'<h2 id="trlx_hybrid\.plugins\.hookspecs\.(\w+)"', page)) == set(HOOKS)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(DOCS)))
def test_what_is_written_from_docstrings_is_as_committed(file: Path) -> None:
    """`python -m tests.api_pages` writes it."""
    assert api_pages.page(file.read_text()) == file.read_text()


def test_hooks_classes_and_settings_can_be_read_without_the_site() -> None:
    hooks, reference, settings = ((DOCS / f"{name}.md").read_text() for name in ("hooks", "reference", "configuration"))
    for name, hook in HOOKS.items():
        part = hooks.partition(f"</a>`{name}`")[2].partition("\n## ")[0]
        assert inspect.getdoc(hook) in part
        assert f"{name}{inspect.signature(hook)}".replace("'", "") in " ".join(part.split()).replace("( ", "(")
    for field in dataclasses.fields(HybridConfig):
        (row,) = re.findall(rf"^\| `{field.name}` \|.*$", settings.partition("VLLMOptions")[0], re.MULTILINE)
        assert field.metadata["help"].replace("|", "\\|") in row
        assert f" | `{field.default!r}` | " in row
    for name in ("protocols.Engine", "protocols.Scoring", "types.Request", "types.Completion"):
        assert f'<a id="trlx_hybrid.contract.{name}"></a>' in reference
    bare = [page.name for page in PAGES if re.search("^::: ", page.read_text(), re.MULTILINE)]
    assert bare in ([], ["recipes.md"])


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_says_when_it_is_called_and_what_it_returns(hook: str) -> None:
    text = inspect.getdoc(HOOKS[hook]) or ""
    assert "Called" in text
    assert re.search(r"Returns? ", text)
    if inspect.signature(HOOKS[hook]).return_annotation != "None":
        assert "None" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_tested(hook: str) -> None:
    assert any(hook in text for text in TESTS), f"no test mentions {hook}"


def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in PAGES:
        if page.stem != "index":
            assert f'href="{page.relative_to(DOCS).with_suffix("")}/"' in home


def test_every_file_has_a_sentence(site: Path) -> None:
    page = (site / "files" / "index.html").read_text()
    files = [file for root in (ROOT / "trlx_hybrid", *ROOT.glob("plugins/*/src/*")) for file in root.rglob("*.py")]
    names = {file.name for file in files if file.name not in ("__init__.py", "__main__.py")}
    assert names == set(re.findall(r"<td><code>([\w.]+\.py)</code></td>\s*<td>[^<]", page))


def test_tables_of_a_terminal_are_not_wrapped() -> None:
    """Neither by the site's style nor by the theme's, which scrolls."""
    assert "pre-wrap" not in (DOCS / "assets" / "extra.css").read_text()


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//', page.read_text()), page
        assert not re.findall(
            r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//', page.read_text()
        ), page


def test_files_that_a_page_includes_are_there(site: Path) -> None:
    pages = {page: html.unescape(re.sub(r"<[^>]+>", "", page.read_text())) for page in site.rglob("*.html")}
    assert not [page for page, text in pages.items() if re.search(r"8 ?< ?--", text)]
    for file in ("pyproject.toml", "src/trlx_hello/plugin.py"):
        assert (ROOT / "examples" / "plugin_hello" / file).read_text() in pages[site / "plugins" / "index.html"]
    example = (ROOT / "examples" / "ray_single_controller.py").read_text()
    assert example.strip() in pages[site / "ray" / "worker-groups" / "index.html"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_runnable_code_compiles(page: Path) -> None:
    text = page.read_text()
    blocks = RUNNABLE.findall(text)
    assert len(blocks) == text.count("<!-- runnable -->")
    for block in blocks:
        compile(block, page.name, "exec")


def test_component_of_the_plugin_page_can_be_offered() -> None:
    from types import ModuleType

    from trlx_hybrid.plugins.host import Host

    plugin = ModuleType("sorted_rollout")
    sys.modules[plugin.__name__] = plugin  # dataclasses look their module up
    try:
        exec(RUNNABLE.findall((DOCS / "plugins.md").read_text())[0], vars(plugin))
        host = Host()
        host.register(plugin, "sorted")
    finally:
        del sys.modules[plugin.__name__]
    component = host.registry.choose("rollout", "sorted")
    rollout = component.factory(None, component.options(longest_first=True))

    class Request:
        def __init__(self, length: int) -> None:
            self.prompt_ids = [0] * length

    class Session:
        class live_engine:
            @staticmethod
            def generate(requests: list, sampling: None) -> list:
                assert [len(r.prompt_ids) for r in requests] == [3, 2, 1]
                return [len(r.prompt_ids) for r in requests]

    assert rollout.run(Session, [Request(2), Request(3), Request(1)], None) == [2, 3, 1]


def test_error_on_the_plugin_page_is_the_real_one() -> None:
    from trlx_hybrid.errors import PluginError
    from trlx_hybrid.plugins.host import Host

    class Hello:
        @hookspecs.hookimpl
        def trlx_rollout_end(self, trajectories: list) -> None:
            len(trajectories) / len(trajectories)

    host = Host()
    host.register(Hello(), "hello", distribution="trlx-hello", version="0.1.0")
    with pytest.raises(PluginError) as caught:
        host.call("trlx_rollout_end", session=None, trajectories=[])
    assert f"PluginError: {caught.value}" in " ".join((DOCS / "plugins.md").read_text().split())


def test_environment_of_the_multi_turn_page_plays() -> None:
    import asyncio

    names: dict = {}
    exec(RUNNABLE.findall((DOCS / "multi-turn.md").read_text())[0], names)
    assert set(names["arguments"]) == {"rollout_func", "reward_funcs"}

    async def play(*answers: str) -> list:
        riddle = names["Riddle"]()
        assert await riddle.reset({"word": "egg", "riddle": "a house without doors"}) == "a house without doors"
        return [await riddle.step(answer) for answer in answers]

    first, last = asyncio.run(play("a wall", "an egg"))
    assert (first.observation, first.done, first.reward) == ("No. It has 3 letters.", False, 0.0)
    assert (last.done, last.reward) == (True, 1.0)


def test_settings_that_stand_beside_those_of_other_frameworks_exist() -> None:
    """The right column of each table: settings as they are written here."""
    import dataclasses

    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer, ModelConfig
    from trlx_hybrid import HybridConfig
    from trlx_hybrid.plugins.host import Host
    from trlx_hybrid.plugins.registry import SLOTS
    from trlx_hybrid_algorithms.sampling import DynamicSamplingOptions
    from trlx_hybrid_multiturn.options import MultiTurnOptions
    from trlx_hybrid_ray.engines.options import RemoteOptions
    from trlx_hybrid_training.options import PackedOptions
    from trlx_hybrid_vllm.options import VLLMOptions

    configs = (GRPOConfig, ModelConfig, HybridConfig, LoraConfig)
    configs += (RemoteOptions, PackedOptions, VLLMOptions, MultiTurnOptions, DynamicSamplingOptions)
    known = {field.name for config in configs for field in dataclasses.fields(config)}
    known |= {*inspect.signature(GRPOTrainer).parameters, *HOOKS}
    known |= {component.name for slot in SLOTS for component in Host.load().registry.components(slot)}
    text = (DOCS / "coming-from.md").read_text()
    cells = re.findall(r"^\|(?! *-).*?\| ([^|]*) \|$", text, re.MULTILINE)
    spans = [span for cell in cells for span in re.findall(r"`([^`]*)`", cell)]
    named = {name for span in spans for name in re.findall(r"^([a-z_]{5,})(?:=.*)?$", span)}
    elsewhere = {"colocate", "episodes", "rollout", "completions", "queries", "prompt", "merge_and_unload"}
    elsewhere |= {"fsdp_version", "resume_from_checkpoint", "dr_grpo", "reset"}
    assert len(named) > 40
    assert named - known - elsewhere == set()


ADDED = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "where-to-add.md").read_text().partition("\n\nChecks are")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| to add")
]


@pytest.mark.parametrize("row", ADDED, ids=lambda row: re.sub(r"\W+", "-", row[0])[:40])
def test_what_a_newcomer_is_sent_to_exists(row: list[str]) -> None:
    _, first, protocol, check, example, kind = row
    for file in re.findall(r"`([\w./-]+/[\w./-]+)`", f"{first} {example}"):
        assert (ROOT / file).is_file()
    named = re.search(r"#([\w.]+)\)", protocol)
    if named is not None:
        assert inspect.isclass(pkgutil.resolve_name(named[1]))
        assert named[1].endswith(f".{re.findall('`(.*?)`', protocol)[0]}")
    else:
        (name,) = re.findall(r"`(\w+)`", protocol)
        assert name in HOOKS or name in inspect.signature(pkgutil.resolve_name("trl:GRPOTrainer")).parameters
    for name in re.findall(r"`(check_\w+)`", check):
        assert name in conformance.__all__
        assert callable(getattr(conformance, name))
    assert kind == "none" or kind.strip("`") in KINDS
    command = {"`tool`": "`trlx-hybrid environments try`"}.get(kind, "")  # the check of such an environment
    assert kind in ("none", "`hook`") or (command or f"`check_{kind.strip('`')}`") in check


NAMED = re.compile(r"`((?:trlx_hybrid|plugins|examples|tests|benchmarks|docs)/[\w./-]+)`")
ROOM = re.compile(r"^\| (`[\w/]+`(?:, `[\w/]+`)*) \| .* \| `([\w/.]+)` \|$", re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {name for name in NAMED.findall(page.read_text()) if "NAME" not in name}
    roots = (ROOT, ROOT / "trlx_hybrid", *ROOT.glob("plugins/*"))  # a page may say that it speaks of one of these
    assert not [name for name in named if not any((root / name).exists() for root in roots)]


def test_the_architecture_says_what_each_room_is_about() -> None:
    table = (DOCS / "architecture.md").read_text().partition("## The rooms")[2].partition("The plugins, none")[0]
    rooms = ROOM.findall(table)
    for _, first in rooms:
        assert (ROOT / "trlx_hybrid" / first).is_file()
    told = {name.strip("`/") for names, _ in rooms for name in names.split(", ")}
    entries = [entry for entry in (ROOT / "trlx_hybrid").iterdir() if not entry.name.startswith("_")]
    assert told == {entry.stem for entry in entries if entry.suffix == ".py" or any(entry.glob("*.py"))}


def test_readme_is_read_in_a_minute() -> None:
    """Six points of at most 30 words; and its versions are those that pip is told."""
    import tomllib

    from packaging.requirements import Requirement

    readme = (ROOT / "README.md").read_text()
    assert readme.count("\n") <= 110
    points = re.findall(r"^- (\*\*.*?)(?=\n- |\n\n)", readme, re.DOTALL | re.MULTILINE)
    assert len(points) == 6
    assert not [point for point in points if len(re.sub(r"\]\(.*?\)", "]", point).split()) > 30]
    core, engine = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in ("", "plugins/trlx-hybrid-vllm")
    )
    declared = [*core["dependencies"], *engine["optional-dependencies"]["cuda"]]
    bounds = {r.name: str(r.specifier) for r in map(Requirement, declared)} | {"Python": core["requires-python"]}
    said = dict(re.findall(r"(Python|TRL|vLLM|transformers|torch) ((?:[\d.]+\d)(?: or [\d.]+\d| or newer)?)", readme))
    assert said == {
        "Python": bounds["Python"].removeprefix(">=") + " or newer",
        "TRL": "1.16",
        "vLLM": "0.31 or 0.32",
        "transformers": "5.17 or newer",
        "torch": bounds["torch"].removeprefix(">=") + " or newer",
    }
    assert (bounds["trl"], bounds["vllm"]) == ("<1.17,>=1.16", "<0.33,>=0.31")
    assert bounds["transformers"] == "<6,>=5.17"


def test_a_newcomer_finds_each_kind_check_and_slot() -> None:
    kinds, checks = {row[5].strip("`") for row in ADDED}, " ".join(row[3] for row in ADDED)
    assert kinds - {"none"} == set(KINDS)
    assert {name for name in conformance.__all__ if name.startswith("check_")} == set(re.findall(r"check_\w+", checks))
    assert len(ADDED) >= len(SLOTS)
    for page in ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/plugins.md", "docs/architecture.md"):
        assert "where-to-add.md" in (ROOT / page).read_text()


CHECK = re.compile(r"^\| (?!failure|---).*\|$", re.MULTILINE)
CHECKS = (DOCS / "checks.md").read_text().partition("## The same script with stock TRL")[0]


@pytest.mark.parametrize("row", CHECK.findall(CHECKS))
def test_each_check_names_tests_that_exist(row: str) -> None:
    tests = re.findall(r"`([\w/.-]+\.py)::(\w+)`", row.rpartition(" | ")[2])
    assert tests, row
    for path, name in tests:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)
