"""Plays verifiers' episodes for a trainer; to verifiers, the package of a harness."""

from .chat import ChatHarness

__all__ = ["ChatHarness"]
