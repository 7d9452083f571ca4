"""A server that plays verifiers' episodes for a trainer. verifiers loads this package as a harness, by its name."""

from .chat import ChatHarness

__all__ = ["ChatHarness"]
