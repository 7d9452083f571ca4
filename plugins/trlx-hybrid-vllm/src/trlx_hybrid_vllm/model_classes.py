"""Classes that the trainer's model and the engine's share.

vLLM's Transformers backend builds its model from transformers' own classes and decorates them for `torch.compile`, in
place: the trainer's model, made earlier from the same class, would then call what only the engine's was set up for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def trainer_classes_kept(trained: nn.Module) -> Iterator[list[nn.Module]]:
    """What happens inside to classes of the trained model is undone afterwards.

    Yields:
        A list for the models built inside. Their modules get subclasses of their own, with what was done to the class.
    """
    classes = {c for module in trained.modules() for c in type(module).__mro__ if c is not object}
    before = {c: (c.__bases__, dict(vars(c))) for c in classes}
    built: list[nn.Module] = []
    try:
        yield built
    finally:
        for cls, (bases, attributes) in before.items():
            if cls.__bases__ != bases:
                own = _moved_into_subclass(cls, bases, attributes)
                for module in (m for model in built for m in model.modules() if type(m) is cls):
                    module.__class__ = own


def _moved_into_subclass(cls: type, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    """The class is again what it was; what was added to it is a subclass's, which bears its name."""
    added = tuple(base for base in cls.__bases__ if base not in bases)
    changed = {key: value for key, value in vars(cls).items() if attributes.get(key) is not value}
    cls.__bases__ = bases
    for key in changed:
        if key in attributes:
            setattr(cls, key, attributes[key])
        else:
            delattr(cls, key)
    return type(cls)(cls.__name__, (cls, *added), {**changed, "__module__": cls.__module__})
