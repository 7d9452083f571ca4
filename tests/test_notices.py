"""Lines that name work which takes long."""

import time

import pytest
from trlx_hybrid import notices
from trlx_hybrid.notices import named_when_long


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(notices, "SECONDS", 0.05)


def test_long_work_is_named_while_it_lasts_and_at_its_end(capsys):
    with named_when_long("building the engine", "Eager starts faster.", rank=0):
        deadline = time.monotonic() + 10
        while not (named := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert named == "trlx_hybrid: building the engine … Eager starts faster.\n"
    assert capsys.readouterr().err == "trlx_hybrid: building the engine took 0 s\n"


def test_short_work_is_not_named(capsys, monkeypatch):
    monkeypatch.setattr(notices, "SECONDS", 60)
    with named_when_long("importing TRL", rank=0):
        pass
    assert not capsys.readouterr().err


def test_work_that_fails_is_named_all_the_same(capsys):
    def fail():
        time.sleep(0.3)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), named_when_long("importing TRL", rank=0):
        fail()
    assert "importing TRL took" in capsys.readouterr().err


@pytest.mark.parametrize("given", [1, None])
def test_other_ranks_name_nothing(capsys, monkeypatch, given):
    monkeypatch.setenv("RANK", "1")
    with named_when_long("importing TRL", rank=given):
        time.sleep(0.2)
    assert not capsys.readouterr().err
