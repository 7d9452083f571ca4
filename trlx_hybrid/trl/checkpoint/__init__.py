"""Checkpoints: what is added to transformers' own when a run is saved, and where a restarted run begins."""

from .checkpoints import checkpoint_to_resume, newest_checkpoint

__all__ = ["checkpoint_to_resume", "newest_checkpoint"]
