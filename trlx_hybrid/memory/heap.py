"""The Python objects that garbage collections leave out (`gc.freeze`), and who froze them."""

from __future__ import annotations

import atexit
import gc

PYTHONS_OWN = 1_000
"""The largest number of objects that Python itself may have frozen: 3.12 starts with 375.

A heap with torch in it has some hundred thousand objects.
"""

_frozen_imports = 0
"""The number of objects that were frozen when `freeze_imports` had frozen what imports had made; 0 if they are not
frozen."""


def freeze_imports() -> None:
    """Exclude the objects that imports have made from garbage collections, until an engine ends or the process exits.

    Trainer, engine and vLLM collect garbage some five times as a run starts and ends. With a million objects of the
    stack each collection takes up to a second. Where a model exists already, nothing is frozen: a frozen model with a
    reference cycle would never be freed.
    """
    global _frozen_imports
    import torch

    if any(issubclass(type(found), torch.nn.Parameter) for found in gc.get_objects()):
        return
    others = frozen_by_the_user()
    gc.freeze()
    _frozen_imports = 0 if others else gc.get_freeze_count()
    atexit.register(gc.unfreeze)  # libraries that count their objects at the exit would report leaks


def frozen_by_the_user() -> int:
    """Return how many objects are frozen, if some are that neither Python nor `freeze_imports` has frozen; else 0.

    Python tells only how many objects are frozen. Objects that imports have made are hardly ever deleted, so a larger
    number than `freeze_imports` left means that someone has called `gc.freeze` since. Counting takes 0.1 s for a
    million.
    """
    frozen = gc.get_freeze_count()
    return frozen if frozen > max(PYTHONS_OWN, _frozen_imports) else 0


def note_unfrozen() -> None:
    """Take note that all objects were unfrozen (`gc.unfreeze`), those that imports have made as well."""
    global _frozen_imports
    if gc.get_freeze_count() <= PYTHONS_OWN:
        _frozen_imports = 0
