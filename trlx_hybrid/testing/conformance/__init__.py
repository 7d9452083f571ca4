"""Conformance checks for authors of components, to be called from their tests. Each builds a run of a tiny model around
the component that it checks.

A check returns None if all is well. Otherwise it raises `ConformanceError`, which says what was found and how to fix
it.
"""

from .advantages import check_advantages
from .algorithm import check_algorithm
from .engine import check_engine
from .environment import check_environment
from .findings import ConformanceError
from .imports import check_imports
from .rollout import check_rollout
from .scoring import check_scoring
from .template import check_template
from .weights import check_weights

__all__ = [
    "ConformanceError",
    "check_advantages",
    "check_algorithm",
    "check_engine",
    "check_environment",
    "check_imports",
    "check_rollout",
    "check_scoring",
    "check_template",
    "check_weights",
]
