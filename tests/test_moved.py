"""Former names of modules: they work and warn, and name modules that are there."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
import warnings

import pytest
import trlx_hybrid
from trlx_hybrid._moved import MOVED, install
from trlx_hybrid.contract.types import Completion, Phase
from trlx_hybrid.interprocess import plain_data

PUBLIC = ("trlx_hybrid.protocols", "trlx_hybrid.types", "trlx_hybrid.serving", "trlx_hybrid.weights.policy")


@pytest.fixture
def not_imported(monkeypatch):
    """Former names as they are before anything has imported them."""
    for former in MOVED:
        monkeypatch.delitem(sys.modules, former, raising=False)
        parent, _, name = former.rpartition(".")
        if parent in sys.modules and vars(sys.modules[parent]).get(name) is not None:
            monkeypatch.delattr(sys.modules[parent], name)


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_is_the_module_at_its_new_place(former, not_imported):
    with pytest.warns(FutureWarning, match=f"The module {former} is {MOVED[former]} now") as told:
        found = importlib.import_module(former)
    assert found is importlib.import_module(MOVED[former])
    assert found.__spec__.name == MOVED[former]
    assert len(told) == 1


def test_it_works_in_every_form_of_import_and_warns_the_importer(not_imported):
    forms = (
        "import trlx_hybrid.types; trlx_hybrid.types.Completion",
        "from trlx_hybrid.types import Completion",
        "from trlx_hybrid import types; types.Completion",
        "import trlx_hybrid; trlx_hybrid.types.Completion",
    )
    for form in forms:
        sys.modules.pop("trlx_hybrid.types", None)
        vars(trlx_hybrid).pop("types", None)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            exec(compile(form, "a script", "exec"), {})
        assert [(w.filename, w.category) for w in told] == [("a script", FutureWarning)], form


def test_nothing_else_is_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trlx_hybrid.nowhere")
    with pytest.raises(AttributeError, match="nowhere"):
        trlx_hybrid.nowhere  # noqa: B018


def test_it_is_installed_once():
    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before


def test_old_pickles_and_recordings_are_read(not_imported):
    with pytest.warns(FutureWarning):
        assert pickle.loads(b"ctrlx_hybrid.types\nCompletion\n.") is Completion
    new = plain_data.dumps(Phase.TRAIN)
    assert plain_data.loads(new.replace(b"trlx_hybrid.contract.types", b"trlx_hybrid.types")) is Phase.TRAIN


def test_a_command_runs_by_its_former_name():
    command = [sys.executable, "-m", "trlx_hybrid.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("trlx-hybrid ")


def test_the_table_names_no_module_twice_and_no_former_name_as_a_new_one():
    assert not MOVED.keys() & MOVED.values()
    assert set(PUBLIC) <= MOVED.keys()
