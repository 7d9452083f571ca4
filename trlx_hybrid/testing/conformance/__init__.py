"""What a component must do, as checks for the tests of its authors: each builds a run of a tiny model around it.

A check returns where all is well, and raises `ConformanceError` otherwise, with what was found and how it is mended.
"""

from .advantages import check_advantages
from .algorithm import check_algorithm
from .engine import check_engine
from .environment import check_environment
from .findings import ConformanceError
from .imports import check_imports
from .rollout import check_rollout
from .weights import check_weights

__all__ = [
    "ConformanceError",
    "check_advantages",
    "check_algorithm",
    "check_engine",
    "check_environment",
    "check_imports",
    "check_rollout",
    "check_weights",
]
