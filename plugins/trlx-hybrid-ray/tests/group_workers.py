"""Worker classes that the tests of groups share, and nested data to give them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from trlx_hybrid_ray.worker_group import WorkerInfo, register, this_worker


class Pair(NamedTuple):
    ids: Any
    text: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    ids: Any
    more: Any = None


@dataclass
class Open:
    ids: Any
    built: int = 0

    def __post_init__(self) -> None:
        self.built += 1


class Echo:
    """One method for each way of calling; remembers what it was given."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.seen: list[Any] = []
        self.info = this_worker()

    @register(dispatch="broadcast")
    def broadcast(self, value: Any, *, scale: int = 1) -> Any:
        return self._saw(value, scale, result=(this_worker().rank, value))

    @register(dispatch="one_to_all")
    def one_to_all(self, value: Any, *, scale: int = 1) -> Any:
        return self._saw(value, scale, result=(this_worker().rank, value))

    @register(dispatch="scatter")
    def scatter(self, batch: Any, more: Any = None) -> Any:
        return self._saw(batch, more, result=batch)

    @register(dispatch="scatter", execute="future")
    def later(self, batch: Any) -> Any:
        return self._saw(batch, result=batch)

    @register(dispatch="rank_zero")
    def rank_zero(self, value: Any) -> Any:
        return self._saw(value, result=(this_worker().rank, value))

    @register(dispatch="one_to_all")
    def log(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen

    @register(dispatch="one_to_all")
    def who(self) -> tuple[WorkerInfo, int, int]:
        return self.info, self.offset, os.getpid()

    @register(dispatch="one_to_all")
    def spoil(self, item: Any) -> Any:
        """Change all of it that can be changed, and return what cannot."""
        refused = []
        for name, value in item.items():
            try:
                value[0] = -1
            except (ValueError, TypeError) as error:
                refused.append((name, type(error).__name__))
        return refused

    @register(dispatch="scatter")
    def through_itself(self, batch: Any) -> Any:
        return self.scatter(batch)

    def _saw(self, *values: Any, result: Any) -> Any:
        self.seen.append(values)
        return result


class Trouble:
    """Fails in every way."""

    def __init__(self, broken: int = -1) -> None:
        if this_worker().rank == broken:
            raise OSError(f"rank {broken} has no disk")
        self.done: list[str] = []

    @register(dispatch="one_to_all")
    def raise_on(self, ranks: list[int]) -> int:
        if this_worker().rank in ranks:
            raise KeyError(f"no such key on {this_worker().rank}")
        return this_worker().rank

    @register(dispatch="scatter", execute="future")
    def raise_later(self, batch: list[int]) -> list[int]:
        if 3 in batch:
            raise ValueError("three")
        return batch

    @register(dispatch="scatter", execute="future")
    def after(self, batch: list[int]) -> list[int]:
        return batch

    @register(dispatch="one_to_all", deadline=2.0)
    def sleep_on(self, rank: int, seconds: float) -> int:
        if this_worker().rank == rank:
            time.sleep(seconds)
        return this_worker().rank

    @register(dispatch="one_to_all", execute="future")
    def sleep_later(self, seconds: float) -> int:
        time.sleep(seconds)
        return this_worker().rank

    @register(dispatch="one_to_all", execute="future")
    def note(self, path: str) -> None:
        with open(f"{path}{this_worker().rank}", "w"):
            pass

    @register(dispatch="one_to_all", execute="future")
    def die_on(self, rank: int) -> int:
        """As ranks in a collective: one dies, the next one fails by it, the others hang."""
        here = this_worker()
        if here.rank == rank:
            time.sleep(0.3)
            os._exit(9)
        if here.rank == (rank + 1) % here.world:
            time.sleep(0.8)
            raise ConnectionResetError("connection reset by peer")
        time.sleep(60)
        return here.rank

    @register(dispatch="one_to_all")
    def leave_on(self, rank: int) -> int:
        if this_worker().rank == rank:
            raise SystemExit(3)
        return this_worker().rank

    @register(dispatch="one_to_all")
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch="scatter")
    def lengths(self, batch: list[int]) -> int:
        return len(batch)


# --- nested data ----------------------------------------------------------------------------------------------------


def alike(first: Any, second: Any) -> bool:
    """Equal in type, structure, dtype, shape and value."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and bool((first == second).all())
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(alike(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(alike, first, second))
    if is_dataclass(first):
        return all(alike(getattr(first, f.name), getattr(second, f.name)) for f in fields(first))
    return bool(first == second)


def leaves(rows: int) -> st.SearchStrategy[Any]:
    """Values that have so many rows."""
    integers = st.lists(st.integers(-9, 9), min_size=rows, max_size=rows)
    messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text("ab", max_size=3)}))
    return st.one_of(
        integers,
        st.lists(messages, min_size=rows, max_size=rows),
        integers.map(lambda v: torch.tensor(v, dtype=torch.float32)),
        integers.map(lambda v: torch.tensor([[x, x + 1] for x in v], dtype=torch.int64).reshape(rows, 2)),
        integers.map(lambda v: np.array(v, dtype=np.int16)),
        integers.map(lambda v: np.array([[x, x] for x in v], dtype=np.float64).reshape(rows, 2)),
    )


def singles() -> st.SearchStrategy[Any]:
    """Values without rows."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-9, 9),
        st.text("xy", max_size=3),
        st.just(torch.tensor(2.5)),
        st.just(np.float32(1.5)),
    )


def structures(rows: int) -> st.SearchStrategy[Any]:
    """Nested data with at least one leaf that has rows."""

    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        other = st.one_of(inner, singles())
        return st.one_of(
            st.builds(lambda a, b: {"ids": a, "more": b}, inner, other),
            st.tuples(other, inner),
            st.builds(Pair, inner, other),
            st.builds(Frozen, inner, other),
            st.builds(Open, inner),
        )

    return st.recursive(leaves(rows), around, max_leaves=4)


def batches() -> st.SearchStrategy[tuple[int, Any]]:
    """(rows, nested data)."""
    return st.integers(0, 9).flatmap(lambda rows: st.tuples(st.just(rows), structures(rows)))
