"""What other processes send: the same values and the same exceptions here, and no code run to read them."""

import asyncio
import collections
import dataclasses
import enum
import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from trlx_hybrid.interprocess import plain_data
from trlx_hybrid.interprocess.plain_data import NotPlainError
from trlx_hybrid.interprocess.remote_errors import RemoteError, describe, restore


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    observation: Any
    reward: float | None = None

    def __post_init__(self):
        calls.append(self)


calls: list[Step] = []
Point = collections.namedtuple("Point", "x y")
Colour = enum.Enum("Colour", {"RED": object()})

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(st.sampled_from(["@", "class", "items"]), inner),
        st.sets(st.integers() | st.text()),
        st.builds(Step, inner),
        st.builds(Point, inner, inner),
    ),
)


@given(values)
def test_plain_values_arrive_as_they_were(value):
    found = plain_data.loads(plain_data.dumps(value))
    assert found == value
    assert type(found) is type(value)


def test_what_numpy_pil_and_enums_have():
    image = Image.new("RGBA", (3, 2), (1, 2, 3, 4))
    array = np.arange(6, dtype=np.float16).reshape(2, 3)[:, ::2]
    given = [image, array, np.int64(3), np.float32(0.5), Colour.RED, math.inf, "\ud800"]
    picture, numbers, *rest = plain_data.loads(plain_data.dumps(given))
    assert (picture.mode, picture.tobytes()) == (image.mode, image.tobytes())
    assert numbers.dtype == array.dtype
    assert numbers.tolist() == array.tolist()
    assert rest == [3, 0.5, Colour.RED, math.inf, "\ud800"]


def test_nobodys_code_runs_to_read_it():
    body = plain_data.dumps(Step("seen"))
    calls.clear()
    assert plain_data.loads(body).observation == "seen"
    assert calls == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (threading.Lock(), "a lock, which cannot be sent"),
        (Step([0, {"k": threading.Lock()}]), r"a Step, of which \.observation\[1\]\['k'\] is a lock, which"),
        ({1: (2, object())}, r"a dict, of which \[1\]\[1\] is an object"),
        (np.array([object()]), "a ndarray"),
        ([10**9000], "a list, which cannot be sent: .*digits"),
    ],
)
def test_what_is_no_plain_data_is_named(value, message):
    with pytest.raises(NotPlainError, match=message):
        plain_data.dumps(value)


def test_a_value_that_holds_itself_is_refused():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NotPlainError, match="a list that holds itself"):
        plain_data.dumps(value)


@pytest.mark.parametrize("name", ["unheard.of:Step", "os:environ", "builtins:int", "subprocess:Popen"])
def test_only_known_classes_of_data_are_built(name):
    body = json.dumps({"@": "dataclass", "class": name, "fields": {"args": ["true"]}}).encode()
    with pytest.raises(NotPlainError, match="no data class that this process has imported"):
        plain_data.loads(body)
    assert "unheard" not in sys.modules


# --- exceptions -------------------------------------------------------------------------------------------------------


class WrongSignError(Exception):
    def __init__(self, number, sign):
        super().__init__(f"{number} is {sign}")
        self.number = number


class HoldingError(Exception):
    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()


def raised_by(function):
    """What arrives elsewhere of what a function raises."""
    try:
        function()
    except BaseException as error:
        sent = plain_data.dumps(describe(error))
        return error, restore(plain_data.loads(sent), "the other process")
    raise AssertionError("nothing was raised")


def raising(error):
    def function():
        raise error

    return function


@pytest.mark.parametrize(
    "function",
    [
        raising(WrongSignError(-1, "negative")),
        raising(ValueError("no")),
        raising(SystemExit(3)),
        raising(asyncio.CancelledError("stop")),
        lambda: Path("/nowhere/at/all").read_text(),
        lambda: {}["key"],
        lambda: b"\xff".decode(),
        lambda: json.loads("{"),
        lambda: object().nothing,
        lambda: subprocess.run(["false"], check=True),
    ],
)
def test_exceptions_arrive_as_they_were(function):
    error, found = raised_by(function)
    assert type(found) is type(error)
    assert str(found) == str(error)
    own = vars(error)
    arrived = {name: value for name, value in vars(found).items() if name != "__notes__" and not hasattr(error, name)}
    assert {name: getattr(found, name) for name in own} | arrived == own
    assert "in the other process" in found.__notes__[-1].lower()
    assert "test_plain_data.py" in found.__notes__[-1]


@pytest.mark.parametrize("error", [HoldingError(), ExceptionGroup("many", [ValueError(1)])])
def test_others_are_stood_for_by_their_text(error):
    _, found = raised_by(raising(error))
    assert isinstance(found, RemoteError)
    assert str(found) == str(error)
    assert found.kind == type(error).__name__
