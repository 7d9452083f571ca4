"""A machine of the cluster, and what of it is free. Read from Ray once, planned with as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from .internals import free_resources

WHOLE = 10_000
"""Ray counts resources in ten-thousandths; so does planning, in whole numbers, since 0.1 + 0.2 is not 0.3."""


def units(amount: float) -> int:
    """An amount in ten-thousandths."""
    return round(amount * WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node.

    Attributes:
        id: Ray's, hexadecimal.
        address: its IP address. Simulated nodes share one, real ones do not.
        cpus, gpus: what it has.
        free_cpus, free_gpus: what nobody has claimed. 2.5 free GPUs are taken to be two whole ones and one half.
    """

    id: str
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float

    @property
    def name(self) -> str:
        """For messages: the address, and as much of the id as tells simulated nodes apart."""
        return f"{self.address} ({self.id[:6]})"

    @property
    def order(self) -> tuple[tuple[int, ...], str, str]:
        """What nodes are sorted by, wherever they come from: the address as a number, then the id."""
        parts = self.address.split(".")
        return tuple(int(p) for p in parts) if all(p.isdecimal() for p in parts) else (), self.address, self.id

    def answers_to(self, asked: str) -> bool:
        """Whether a user who writes `asked` may mean this node: its address, its id, or the beginning of it."""
        return asked == self.address or (len(asked) >= 6 and self.id.startswith(asked))


def alive() -> list[Node]:
    """The cluster's nodes, in order."""
    import ray

    free = free_resources()
    found = []
    for entry in ray.nodes():  # type: ignore[no-untyped-call]
        if entry["Alive"]:
            has, left = entry["Resources"], free.get(entry["NodeID"], {})
            found.append(
                Node(
                    id=entry["NodeID"],
                    address=entry["NodeManagerAddress"],
                    cpus=has.get("CPU", 0.0),
                    gpus=has.get("GPU", 0.0),
                    free_cpus=left.get("CPU", 0.0),
                    free_gpus=left.get("GPU", 0.0),
                )
            )
    return sorted(found, key=lambda node: node.order)
