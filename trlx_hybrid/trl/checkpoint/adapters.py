"""Saving and loading of all adapters of a PEFT model in a checkpoint, of which transformers 5.17 and accelerate 1.15
handle only some.

When it resumes, transformers loads adapters from their folders, but not the adapter "default", which lies beside those
folders. When it loads the best model at the end of training, it looks for an adapter only where "default" lies, and
loads it into the first active adapter. accelerate saves only one adapter of a model whose checkpoint FSDP keeps in
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...policy.adapters import tuned

DEFAULT = "default"
"""The adapter that PEFT saves in the checkpoint's folder itself; each other adapter gets a subfolder."""

FILES = ("adapter_model.safetensors", "adapter_model.bin")


def saved_adapters(model: Any, checkpoint: Path) -> dict[str, Path]:
    """Return the folder of each adapter of a model that a checkpoint contains in PEFT's format, by the adapter's name.

    Args:
        model: a PEFT model.
    """
    folders = {name: checkpoint if name == DEFAULT else checkpoint / name for name in model.peft_config}
    return {name: path for name, path in folders.items() if any((path / file).is_file() for file in FILES)}


def load_adapters(model: Any, checkpoint: Path) -> bool:
    """Load all adapters of a PEFT model that a checkpoint contains in PEFT's format. Return whether there are any."""
    found = saved_adapters(model, checkpoint) if tuned(model) else {}
    for name, path in found.items():
        model.load_adapter(str(path), name, is_trainable=True)
    return bool(found)


def load_default(model: Any, checkpoint: Path) -> None:
    """Load the adapter "default" of a checkpoint that contains other adapters as well: transformers then loads only the
    others."""
    found = saved_adapters(model, checkpoint) if tuned(model) else {}
    if DEFAULT in found and len(found) > 1:
        model.load_adapter(str(checkpoint), DEFAULT, is_trainable=True)


@contextmanager
def one_by_one(model: Any, plugin: Any, move: Callable[[int], object]) -> Iterator[None]:
    """Return a context in which accelerate saves or loads a PEFT model in FSDP's shards. accelerate saves or loads one
    active adapter only; inside the context it is the first active adapter. On exit, `move` is called for each further
    active adapter.

    Args:
        plugin: accelerate's settings of FSDP; None without FSDP.
        move: a function that saves or loads the adapter that is active when it is called. Its argument, a number from 1
            on, distinguishes the files of the adapters.
    """
    if plugin is None or "SHARDED_STATE_DICT" not in str(plugin.state_dict_type) or not tuned(model):
        yield
        return
    first, *further = model.active_adapters
    named = model.active_adapter
    try:
        model.active_adapter = first  # accelerate saves the active adapter
        yield
        for number, name in enumerate(further, start=1):
            model.active_adapter = name
            move(number)
    finally:
        model.active_adapter = named
