"""A placement as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .placement import Bundle, Placement, Slot


def drawn(placement: Placement) -> str:
    """One line per node and per GPU on it, with who lives there; workers without a GPU in one line per node.

    `trainer 0-3` are ranks; `engine 1.0-3` are the workers 0 to 3 of replica 1.
    """
    sizes = {role.name: role.size for role in placement.roles}
    lines = ["placement"]
    for node in placement.nodes:
        here = [slot for slot in placement.slots if slot.node == node.id]
        if not here:
            continue
        bundles = {(s.group, s.bundle): placement.groups[s.group][s.bundle] for s in here}
        gpus = sum(bundle.gpus for bundle in bundles.values())
        cpus = sum(bundle.cpus for bundle in bundles.values())
        lines.append(f"  {node.name}  {gpus:g} of {node.gpus:g} GPUs, {cpus:g} of {node.cpus:g} CPUs")
        living: dict[str, list[Slot]] = {}
        for key, bundle in bundles.items():
            living.setdefault(_where(bundle), []).extend(s for s in here if (s.group, s.bundle) == key)
        for where, slots in living.items():
            lines.append(f"    {where:8} {', '.join(_names(slots, sizes))}")
    spanning = [number for number, group in enumerate(placement.groups) if len({b.node for b in group}) > 1]
    if spanning:
        who = sorted({f"{s.role} {s.replica}" for s in placement.slots if s.group in spanning})
        lines.append(f"  over several nodes, as asked: {', '.join(who)}")
    return "\n".join(lines)


def _where(bundle: Bundle) -> str:
    if not bundle.gpus:
        return "CPU"
    share = f" ×{bundle.gpus:g}" if bundle.gpus < 1 else ""
    return f"GPU {','.join(bundle.gpu_ids) or '?'}{share}"


def _names(slots: Sequence[Slot], sizes: dict[str, int]) -> list[str]:
    found = []
    for (role, replica), members in groupby(slots, lambda s: (s.role, s.replica if sizes[s.role] > 1 else -1)):
        numbers = sorted(s.local if replica >= 0 else s.rank for s in members)
        found.append(f"{role} {f'{replica}.' if replica >= 0 else ''}{_ranges(numbers)}")
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as 1-3,7."""
    parts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(parts)
