"""The architecture's walls: who may import whom, and when."""

import ast
import gc
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trlx_hybrid
from trlx_hybrid.plugins.host import Host
from trlx_hybrid.plugins.registry import SLOTS

ROOT = Path(__file__).parent.parent
HOST = sorted((ROOT / "trlx_hybrid").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").glob("*/src/*"))


def imports(file):
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def modules():
    """Return the files of all modules by name, without templates."""
    files = [file for folder in (ROOT / "trlx_hybrid", *PLUGINS) for file in folder.rglob("*.py")]
    found = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts[3:] if parts[0] == "plugins" else parts
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported(name, file, known):
    """Return the modules of ours that a module imports: also for types, inside functions and by a string."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names if names <= known.keys() else {*names, base}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {text[1] for text in re.finditer(r"^(trlx_hybrid\w*\.[\w.]+)(:\w+)?$", node.value)}
    return (found & known.keys()) - {name}


def test_no_module_imports_one_that_imports_it():
    known = modules()
    graph = {name: imported(name, file, known) for name, file in known.items()}
    assert len(graph) > 200
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_what_is_imported_by_a_text_is_there():
    known = modules()
    for file in known.values():
        for node in ast.walk(ast.parse(file.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            module, _, name = text.partition(":")
            if re.fullmatch(r"trlx_hybrid\w*(\.\w+)+:\w+", text):
                body = ast.parse(known[module].read_text()).body
                assert name in {getattr(each, "name", None) for each in body}, f"{file}: {text}"


def room(module):
    """Return the room of a module: the folder of its distribution in which it lies, or the module itself."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else module


def rooms():
    """Return for each room the rooms that it imports."""
    known = modules()
    graph = {}
    for name, file in known.items():
        graph.setdefault(room(name), set()).update(map(room, imported(name, file, known)))
    return {name: others - {name} for name, others in graph.items()}


def test_no_room_imports_one_that_imports_it():
    list(graphlib.TopologicalSorter(rooms()).static_order())  # raises CycleError, which names the rooms


def test_rooms_import_what_is_drawn_below_them():
    """The picture of the rooms in the architecture page is the order of imports, from the top down."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = page.partition("## The order of the rooms")[2].split("```")[1]
    levels = [line.split("  ")[0].split(" · ") for line in picture.strip().splitlines()]
    full = {name: "trlx_hybrid" if name == "trlx_hybrid" else f"trlx_hybrid.{name}" for line in levels for name in line}
    level = {full[name]: -number for number, line in enumerate(levels) for name in line}
    graph = {name: others for name, others in rooms().items() if name.partition(".")[0] == "trlx_hybrid"}
    assert level.keys() == graph.keys()
    up = {f"{a} -> {b}" for a, others in graph.items() for b in others if level.get(b, 1) >= level[a]}
    assert not up


def in_fresh_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_leaves_torch_and_trl_out():
    code = "import sys, trlx_hybrid; print([m for m in ('torch', 'trl', 'vllm', 'ray', 'numpy') if m in sys.modules])"
    assert in_fresh_python(code) == "[]"


def test_an_import_on_a_cpu_says_nothing_of_triton():
    """vLLM warns of it, with the level that users have; what else that logger has to say is told."""
    code = "from trlx_hybrid import GRPOTrainer; import logging; "
    code += "logging.getLogger('vllm.triton_utils.importing').warning('An unexpected error occurred')"
    plain = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=plain)
    assert "Triton is installed" not in done.stdout + done.stderr
    assert "An unexpected error occurred" in done.stdout + done.stderr


def test_what_imports_create_is_frozen_unless_a_model_exists():
    """A frozen model with a reference cycle would never be freed."""
    code = """import gc, torch
from trlx_hybrid.memory.heap import freeze_imports
model = torch.nn.Linear(2, 2)
freeze_imports()
before = gc.get_freeze_count()
del model
freeze_imports()
print(gc.get_freeze_count() - before > 50_000)"""
    assert in_fresh_python(code) == "True"


def test_loading_every_plugin_leaves_the_backends_out():
    code = (
        "import sys; from trlx_hybrid.plugins.host import Host; host = Host.load();"
        "print([p.name for p in host.plugins], [m for m in ('vllm', 'ray', 'trl') if m in sys.modules])"
    )
    names = ["algorithms", "cure", "multiturn", "ray", "reshard", "training", "trajectories", "vllm"]
    assert in_fresh_python(code) == f"{names} []"


@pytest.mark.parametrize("name", ["GRPOTrainer", "HybridEngine"])
@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_is_collected_after_an_import_as_before(name, collecting):
    try:
        if not collecting:
            gc.disable()
        assert getattr(trlx_hybrid, name).__name__ == name
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


@pytest.mark.parametrize("file", HOST, ids=lambda f: str(f.relative_to(ROOT)))
def test_the_host_knows_no_backend_and_four_files_know_trl(file):
    found = imports(file)
    assert not found & {"ray", "vllm"}
    allowed = [f"trlx_hybrid/trl/{name}.py" for name in ("trainer", "attach", "borrowed", "recipe")]
    allowed.append("trlx_hybrid/testing/fixtures.py")  # for tests of plugins
    assert "trl" not in found or str(file.relative_to(ROOT)) in allowed


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda p: p.name)
def test_plugins_never_import_each_other(plugin):
    others = {p.name for p in PLUGINS} - {plugin.name}
    assert not any(imports(file) & others for file in plugin.rglob("*.py"))


def test_no_code_asks_for_a_component_by_its_name():
    """What one needs of another is declared where it is offered. `vllm` is a library, too."""
    offered = Host.load().registry
    names = {c.name for slot in SLOTS for c in offered.components(slot)} - {"vllm"}
    for file in [*HOST, *(file for plugin in PLUGINS for file in plugin.rglob("*.py"))]:
        for compared in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Compare)):
            found = {n.value for n in ast.walk(compared) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            assert not found & names, f"{file}:{compared.lineno}"
