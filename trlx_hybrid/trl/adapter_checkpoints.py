"""The adapters of a PEFT model in a checkpoint, of which transformers 5.17 and accelerate 1.15 miss some.

Resuming, transformers loads adapters from their folders, and not the one "default", which lies beside those. At the end
it looks for the best model's adapter in that place alone, and loads what lies there into the first active adapter.
accelerate saves one adapter of a model whose checkpoint FSDP keeps in shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..weights.adapters import tuned

DEFAULT = "default"
"""The adapter that PEFT saves in a checkpoint itself; each of the others gets a folder there."""

FILES = ("adapter_model.safetensors", "adapter_model.bin")


def saved_adapters(model: Any, checkpoint: Path) -> dict[str, Path]:
    """Return the adapters of a model that lie in a checkpoint as PEFT saves them, each with its folder."""
    folders = {name: checkpoint if name == DEFAULT else checkpoint / name for name in model.peft_config}
    return {name: path for name, path in folders.items() if any((path / file).is_file() for file in FILES)}


def load_adapters(model: Any, checkpoint: Path) -> bool:
    """Load all adapters of a PEFT model that lie in a checkpoint as PEFT saves them. Returns whether any do."""
    found = saved_adapters(model, checkpoint) if tuned(model) else {}
    for name, path in found.items():
        model.load_adapter(str(path), name, is_trainable=True)
    return bool(found)


def load_default(model: Any, checkpoint: Path) -> None:
    """Load the adapter "default" of a checkpoint that has others beside it."""
    found = saved_adapters(model, checkpoint) if tuned(model) else {}
    if DEFAULT in found and len(found) > 1:
        model.load_adapter(str(checkpoint), DEFAULT, is_trainable=True)


@contextmanager
def one_by_one(model: Any, plugin: Any, move: Callable[[int], object]) -> Iterator[None]:
    """Where FSDP keeps checkpoints in shards, have them hold all active adapters of a PEFT model.

    What runs inside saves or loads the first of them.

    Args:
        plugin: accelerate's settings of FSDP; None without FSDP.
        move: saves or loads a further one, under a number from 1.
    """
    if plugin is None or "SHARDED_STATE_DICT" not in str(plugin.state_dict_type) or not tuned(model):
        yield
        return
    first, *further = model.active_adapters
    named = model.active_adapter
    try:
        model.active_adapter = first  # by which accelerate knows what to save
        yield
        for number, name in enumerate(further, start=1):
            model.active_adapter = name
            move(number)
    finally:
        model.active_adapter = named
