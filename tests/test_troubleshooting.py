"""The page on messages: a section for each public error, no message that is not in the sources, and a link to it from
each error. And each hook, slot and error is used: by a plugin, by an example or by what `trlx-hybrid new` writes."""

import ast
import functools
import importlib.util
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from trlx_hybrid import errors
from trlx_hybrid.commands.main import main
from trlx_hybrid.interprocess import plain_data
from trlx_hybrid.interprocess.remote_errors import describe, restore
from trlx_hybrid.plugins import hookspecs
from trlx_hybrid.plugins.registry import SLOTS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / errors.TROUBLESHOOTING).read_text()
SOURCES = [path for folder in (ROOT / "trlx_hybrid", *ROOT.glob("plugins/*/src")) for path in folder.rglob("*.py")]
USERS = [path for folder in (*ROOT.glob("plugins/*/src"), ROOT / "examples") for path in folder.rglob("*.py")]
SCAFFOLDS = sorted((ROOT / "trlx_hybrid" / "commands" / "templates").rglob("*.py.in"))
TESTS = [
    path
    for folder in (ROOT / "tests", *ROOT.glob("plugins/*/tests"))
    for path in folder.rglob("*.py")
    if path != Path(__file__)
]
ROW = re.compile(r"^\| (?!-|message)(.*?) \| ", re.MULTILINE)
HOOKS = [name for name in vars(hookspecs) if name.startswith("trlx_")]


def tree(path: Path) -> ast.Module:
    """Not kept: a million nodes would be in the way of each garbage collection of the tests that follow."""
    return ast.parse(path.read_text())


@functools.cache
def public_errors() -> list[str]:
    """Subclasses of HybridError, and the errors that a package exports."""
    above: dict[str, set[str]] = {}
    exported = set()
    for node in (node for path in SOURCES for node in tree(path).body):  # each process of the tests reads them
        if isinstance(node, ast.ClassDef):
            above.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.List)
            and "__all__" in map(name_of, node.targets)
        ):
            exported |= {item.value for item in node.value.elts if isinstance(item, ast.Constant)}
    found = {"HybridError"}
    while more := {name for name, bases in above.items() if bases & found} - found:
        found |= more
    return sorted(found | {name for name in exported if name.endswith("Error")})


def name_of(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def text_of(node: ast.AST) -> str:
    """A string or f-string as the page writes it: … for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(text_of(part) or "…" for part in node.values) if isinstance(node, ast.JoinedStr) else ""


@functools.cache
def messages() -> list[tuple[str, frozenset[str]]]:
    """All strings of the sources but docstrings, each with the public errors that it is handed to."""
    found = []

    def visit(node: ast.AST, handed: frozenset[str]) -> None:
        if isinstance(node, ast.Call):
            handed = frozenset(map(name_of, [node.func, *node.args[:1]])) & set(public_errors())
        if text := " ".join(text_of(node).split()):
            found.append((text, handed))
        if not isinstance(node, ast.JoinedStr):
            for child in ast.iter_child_nodes(node):
                if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                    visit(child, handed)

    for path in SOURCES:
        visit(tree(path), frozenset())
    return found


def sections() -> dict[str, str]:
    parts = re.split(r"^### (\w+)$", PAGE, flags=re.MULTILINE)
    return {name: re.split(r"^##", text, flags=re.MULTILINE)[0] for name, text in zip(parts[1::2], parts[2::2])}


def quoted() -> Iterator[tuple[str, str]]:
    """Class and message of each row."""
    for name, text in sections().items():
        for cell in ROW.findall(text):
            yield name, cell


@pytest.mark.parametrize("name", public_errors())
def test_a_public_error_has_a_section(name: str) -> None:
    assert name in sections()


def test_no_section_of_an_error_that_is_gone() -> None:
    assert {name for name in sections() if name.endswith("Error")} == set(public_errors())
    assert len(public_errors()) > 20


@pytest.mark.parametrize(("name", "cell"), list(quoted()))
def test_a_message_is_one_of_the_sources_and_of_that_class(name: str, cell: str) -> None:
    (message,) = re.fullmatch(r"`([^`]+)`", cell).groups()
    fragments = [part for part in message.split("…") if part]
    assert re.search(r"\w{3}", "".join(fragments))
    pattern = re.compile(".*".join(map(re.escape, fragments)))
    found = [handed for text, handed in messages() if pattern.search(text)]
    assert found, f"no message like {message!r}"
    classes = frozenset[str]().union(*found)
    assert not classes or name in classes


def test_the_page_quotes_most_classes_messages() -> None:
    assert len(list(quoted())) > 100
    assert {name for name, _ in quoted()} >= set(public_errors()) - {"ConformanceError"}


@pytest.mark.parametrize(("package", "folder"), [("TRL", "trl/trainer"), ("vLLM", "vllm/v1")])
def test_messages_of_others_are_those_of_the_installed_versions(package: str, folder: str) -> None:
    name, _, inside = folder.partition("/")
    files = Path(importlib.util.find_spec(name).origin).parent.joinpath(inside).rglob("*.py")
    text = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)
    text = re.sub(r"\{[^{}]*\}", "…", text)
    (table,) = re.findall(rf"^\| message of {package} \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    found = [span for cell in ROW.findall(table) for span in re.findall("`(.*?)`", cell)]
    assert len(found) >= 3
    for span in found:
        assert span in text


# --- From an error to its section ------------------------------------------------------------------------------------


def made(name: str) -> BaseException:
    from trlx_hybrid_ray import errors as of_ray

    kind = (vars(errors) | vars(of_ray))[name]
    of_a_worker = {"rank": 1, "method": "go", "node": "a", "traceback": "there"}
    given = {
        "PluginError": {"plugin": "hello", "hook": "trlx_log"},
        "MemoryPlanError": {"owner": "policy"},
        "WorkerError": of_a_worker,
        "DeadlineError": of_a_worker,
    }
    return kind("say what to do", **given.get(name, {}))


SOME = [
    "ConfigError",
    "PluginError",
    "MemoryPlanError",
    "StaleWeightsError",
    "ScriptError",
    "WorkerError",
    "DeadlineError",
]


@pytest.mark.parametrize("name", SOME)
def test_a_traceback_ends_with_the_section(name: str) -> None:
    error = made(name)
    assert str(error) == "say what to do"
    *_, message, last = "".join(traceback.format_exception(error)).splitlines()
    assert message.endswith(f"{name}: say what to do")
    assert last == f"See docs/troubleshooting.md#{name.lower()} in the repository of trlx-hybrid."


@pytest.mark.parametrize("name", SOME)
def test_an_error_is_the_same_after_pickling(name: str) -> None:
    error = made(name)
    error.add_note("on rank 1")
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == "say what to do"
    assert vars(arrived) == vars(error)
    assert len(arrived.__notes__) == 2


def test_an_error_of_another_process_names_its_section_once() -> None:
    error = errors.ConfigError("say what to do")
    arrived = restore(plain_data.loads(plain_data.dumps(describe(error))), "the tool's process")
    assert type(arrived) is errors.ConfigError
    assert [note.split()[0] for note in arrived.__notes__] == ["See", "In"]


def test_an_error_of_another_project_names_the_section_of_ours() -> None:
    class TheirsError(errors.EngineError):
        pass

    assert TheirsError("no").page == "docs/troubleshooting.md#engineerror"


def test_a_command_that_fails_names_the_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--hook", "trlx_nothing"]) == 1
    message, link = capsys.readouterr().err.splitlines()
    assert message.startswith("error: --hook trlx_nothing: no such hook.")
    assert link == "See docs/troubleshooting.md#configerror in the repository of trlx-hybrid."


def test_rays_errors_in_a_line_leave_the_section_out() -> None:
    from trlx_hybrid_ray.errors import brief

    code = "from trlx_hybrid.errors import SyncError; raise SyncError('weights differ')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "#syncerror" in done.stderr.splitlines()[-1]
    assert brief(RuntimeError(done.stderr)) == "RuntimeError: trlx_hybrid.errors.SyncError: weights differ"


# --- What is offered is used -----------------------------------------------------------------------------------------


def implemented(text: str) -> set[str]:
    """Hooks of a plugin's source."""
    return set(re.findall(r"@hookimpl(?:\([^)]*\))?\n *def (trlx_\w+)", text))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_used_by_a_plugin(hook: str) -> None:
    assert any(hook in implemented(path.read_text()) for path in (*USERS, *SCAFFOLDS)), f"no plugin implements {hook}"


@functools.cache
def offered() -> set[str]:
    """Slots that the sources offer components for."""
    return {
        node.args[0].value
        for path in USERS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and name_of(node.func) == "offer" and isinstance(node.args[0], ast.Constant)
    }


@pytest.mark.parametrize("slot", SLOTS)
def test_a_slot_is_documented_and_filled_by_a_plugin(slot: str) -> None:
    assert re.search(rf"^\| `{slot}` \| \[", (ROOT / "docs" / "plugins.md").read_text(), re.MULTILINE)
    assert slot in offered(), f"no plugin offers {slot}"


@functools.cache
def caught() -> set[str]:
    """Classes that tests expect: by `pytest.raises(X)`, by `except X`, or by its section in what a command prints."""
    found: set[str] = set()
    sections_of = {f"#{name.lower()}": name for name in public_errors()}
    for node in (node for path in TESTS for node in ast.walk(tree(path))):
        expected: list[ast.AST] = []
        if isinstance(node, ast.Call) and name_of(node.func) == "raises":
            expected = list(node.args[:1])
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            expected = [node.type]
        elif isinstance(node, ast.Constant) and node.value in sections_of:
            found.add(sections_of[node.value])
        found |= {name_of(item) for item in expected} | {name_of(i) for e in expected for i in getattr(e, "elts", ())}
    return found


@pytest.mark.parametrize("name", public_errors())
def test_a_public_error_is_exercised_by_a_test(name: str) -> None:
    assert name in caught(), f"no test expects {name}"
