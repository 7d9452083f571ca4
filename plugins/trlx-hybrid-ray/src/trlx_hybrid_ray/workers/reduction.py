"""Several results into one, place by place through nested data. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .failure import DispatchError
from .structure import is_array, is_tensor, mapped


def reduce(how: str | Callable[[list[Any]], Any], results: Sequence[Any], weights: Sequence[float]) -> Any:
    """One result.

    Args:
        how: "sum", "mean", "min", "max", or a function of the list of results.
        results: one per replica, alike in structure; lists are structure here.
        weights: of each result in a mean: its rows. A result of no rows is left out, whatever `how` is: the mean of
            nothing is NaN.

    Raises:
        DispatchError: the results are not alike, or a value in them is no number.
    """
    counted = [(result, weight) for result, weight in zip(results, weights, strict=True) if weight]
    if not counted:
        counted = [(result, 1.0) for result in results]
    values, shares = [result for result, _ in counted], [weight for _, weight in counted]
    if callable(how):
        return how(values)
    return mapped(lambda *leaves: _reduced(how, leaves[:-1], shares, leaves[-1]), values, "the result", lists=True)


def _reduced(how: str, values: Sequence[Any], weights: Sequence[float], path: str) -> Any:
    for number, value in enumerate(values):
        if not _number(value):
            raise DispatchError(
                f"{path} of replica {number} is a {type(value).__name__}, which has no {how}. Return numbers, tensors "
                "or arrays, or register the method with a function as `reduction`."
            )
        if getattr(value, "shape", ()) != getattr(values[0], "shape", ()):
            raise DispatchError(f"{path} has another shape on replica {number} than on the first, and no {how}.")
    if how == "sum":
        return _sum(values)
    if how == "mean":
        return _sum([value * weight for value, weight in zip(values, weights, strict=True)]) / sum(weights)
    return _extreme(how, values)


def _number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex)) or hasattr(value, "dtype")


def _sum(values: Sequence[Any]) -> Any:
    if all(isinstance(value, float) for value in values):
        return math.fsum(values)  # the same in any order of the ranks
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _extreme(how: str, values: Sequence[Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        if is_tensor(found):
            found = getattr(found, "minimum" if how == "min" else "maximum")(value)
        elif is_array(found):
            import numpy

            found = (numpy.minimum if how == "min" else numpy.maximum)(found, value)
        else:
            found = min(found, value) if how == "min" else max(found, value)
    return found
