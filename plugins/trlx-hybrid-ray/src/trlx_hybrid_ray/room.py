"""What is left of a node while a plan is being made."""

from __future__ import annotations

from dataclasses import dataclass

from .node import WHOLE, Node, units
from .seats import Block


@dataclass(frozen=True, slots=True)
class Room:
    """Free units of one node.

    Attributes:
        cpus: units.
        gpus: GPUs that nobody uses.
        parts: units left of GPUs that are shared, in the order in which they began to be. The first may be left over by
            others.
    """

    cpus: int
    gpus: int
    parts: tuple[int, ...]

    @classmethod
    def of(cls, node: Node) -> Room:
        """What is free on a node now."""
        whole, part = divmod(units(node.free_gpus), WHOLE)
        return cls(units(node.free_cpus), whole, (part,) if part else ())

    def seated(self, block: Block) -> tuple[Room, tuple[int | None, ...]] | None:
        """What is left with the block placed here, and which part each seat takes (None: GPUs of its own, or none).

        A fraction goes to the fullest part that has room for it, and opens another GPU only where none has.
        Returns None if the block does not fit.
        """
        cpus, gpus, parts = self.cpus, self.gpus, list(self.parts)
        taken: list[int | None] = []
        for seat in block.seats:
            cpus -= seat.cpus
            part = None
            if seat.gpus % WHOLE == 0:
                gpus -= seat.gpus // WHOLE
            else:
                fitting = [i for i, left in enumerate(parts) if left >= seat.gpus]
                if fitting:
                    part = min(fitting, key=lambda i: parts[i])
                else:
                    gpus, part = gpus - 1, len(parts)
                    parts.append(WHOLE)
                parts[part] -= seat.gpus
            if cpus < 0 or gpus < 0:
                return None
            taken.append(part)
        return Room(cpus, gpus, tuple(parts)), tuple(taken)

    def fits(self, block: Block, most: int) -> int:
        """How many such blocks fit, up to `most`."""
        room, count = self, 0
        while count < most and (seated := room.seated(block)) is not None:
            room, count = seated[0], count + 1
        return count
