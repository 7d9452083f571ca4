"""A server that plays verifiers' episodes for a trainer, and the harness that verifiers loads by the package's name."""

from .chat import ChatHarness

__all__ = ["ChatHarness"]
