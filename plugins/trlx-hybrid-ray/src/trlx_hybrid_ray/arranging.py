"""The search: which block goes to which node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .node import Node
from .role import Role
from .room import Room
from .seats import Block

Rooms = tuple[Room, ...]
Counts = Mapping[int, int]
Step = Callable[[int, Mapping[int, int]], tuple[int, Iterable[int]]]
"""From the blocks left and the nodes not yet decided: which node is next, and the numbers of blocks to try on it."""


@dataclass(frozen=True, slots=True)
class Seated:
    """Where a block went: the index of its node, and the part of a shared GPU that each of its seats takes, if any."""

    node: int
    parts: tuple[int | None, ...]


@dataclass(slots=True)
class _Kind:
    """Blocks that can be swapped: of one role and one shape. `indices` are theirs among all blocks."""

    block: Block
    indices: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Budget:
    left: int


def arranged(nodes: Sequence[Node], blocks: Sequence[Block], attempts: int) -> list[Seated] | None:
    """A node for every block, or None where there is no arrangement, or none was found in so many attempts.

    Depth-first over kinds of blocks, the hardest to place first; for each kind over the numbers of blocks that each
    node gets, in the order that the role's strategy prefers. Blocks of a kind then go to nodes in order.
    """
    kinds: dict[tuple[str, tuple[tuple[int, int], ...]], _Kind] = {}
    for index, block in enumerate(blocks):
        kinds.setdefault((block.role.name, block.shape), _Kind(block)).indices.append(index)
    ordered = sorted(kinds.values(), key=lambda kind: _ease(kind.block))
    counts = _search(nodes, ordered, tuple(Room.of(node) for node in nodes), {}, _Budget(attempts))
    if counts is None:
        return None
    rooms = [Room.of(node) for node in nodes]
    found: dict[int, Seated] = {}
    for kind, dealt in zip(ordered, counts):
        targets = [node for node in sorted(dealt) for _ in range(dealt[node])]
        for index, node in zip(kind.indices, targets, strict=True):
            seated = rooms[node].seated(kind.block)
            assert seated is not None, "the search seated the same blocks in the same order"
            rooms[node] = seated[0]
            found[index] = Seated(node, seated[1])
    return [found[index] for index in range(len(blocks))]


def _ease(block: Block) -> tuple[bool, bool, int, int]:
    """Low for blocks that few nodes can take."""
    free = block.role.node is None, not block.role.strategy.startswith("strict")
    return *free, -sum(seat.gpus for seat in block.seats), -sum(seat.cpus for seat in block.seats)


def _search(
    nodes: Sequence[Node], kinds: Sequence[_Kind], rooms: Rooms, used: Mapping[str, frozenset[int]], budget: _Budget
) -> list[Counts] | None:
    """The counts by node of each kind. `used`: the nodes that kinds of the same role already have."""
    if not kinds:
        return []
    kind, *others = kinds
    role = kind.block.role
    allowed = [i for i, node in enumerate(nodes) if role.node is None or node.answers_to(role.node)]
    # Numbered by how little room they have: of two that do, the tighter one is taken, and large gaps stay.
    tight = sorted(allowed, key=lambda i: (rooms[i].gpus, rooms[i].parts, rooms[i].cpus, i))
    caps = {n: cap for n, i in enumerate(tight) if (cap := rooms[i].fits(kind.block, len(kind.indices)))}
    taken = used.get(role.name, frozenset())
    for dealt in _dealt(role, len(kind.indices), caps, frozenset(n for n, i in enumerate(tight) if i in taken)):
        counts = {tight[n]: count for n, count in dealt.items()}
        budget.left -= 1 + len(caps)
        if budget.left < 0:
            return None
        after = {**used, role.name: taken | frozenset(counts)}
        rest = _search(nodes, others, _filled(rooms, kind.block, counts), after, budget)
        if rest is not None:
            return [counts, *rest]
    return None


def _filled(rooms: Rooms, block: Block, counts: Counts) -> Rooms:
    after = list(rooms)
    for node, count in counts.items():
        for _ in range(count):
            seated = after[node].seated(block)
            assert seated is not None, "a node is dealt no more blocks than fit"
            after[node] = seated[0]
    return tuple(after)


def _dealt(role: Role, blocks: int, caps: Mapping[int, int], used: frozenset[int]) -> Iterator[Counts]:
    """Every way to deal so many blocks out to nodes, the role's favourite first."""
    if role.strategy == "strict_pack":
        roomy = [node for node in caps if caps[node] >= blocks and used <= {node}]
        yield from ({node: blocks} for node in sorted(roomy, key=lambda node: (caps[node], node)))
    elif role.strategy == "strict_spread":
        yield from _dealings(blocks, {node: 1 for node in caps if node not in used}, _evenly)
    else:
        yield from _dealings(blocks, caps, _evenly if role.strategy == "spread" else _tightly)


def _dealings(blocks: int, caps: Mapping[int, int], step: Step) -> Iterator[Counts]:
    """Node by node, as `step` chooses, and back again. Not recursive: clusters have more nodes than Python frames."""
    dealt: dict[int, int] = {}
    left, untouched = blocks, dict(caps)
    trail: list[tuple[int, int, Iterator[int]]] = []
    while True:
        if not left:
            yield {node: count for node, count in dealt.items() if count}
        elif sum(untouched.values()) >= left:
            node, tries = step(left, untouched)
            trail.append((node, untouched.pop(node), iter(tries)))
        while trail:
            node, cap, remaining = trail[-1]
            left += dealt.pop(node, 0)
            count = next(remaining, None)
            if count is not None:
                dealt[node] = count
                left -= count
                break
            untouched[node] = cap
            trail.pop()
        else:
            return


def _tightly(left: int, caps: Mapping[int, int]) -> tuple[int, Iterable[int]]:
    """On few nodes: the tightest that takes all that is left, or else the roomiest, filled up."""
    enough = [node for node in caps if caps[node] >= left]
    node = min(enough, key=lambda n: (caps[n], n)) if enough else min(caps, key=lambda n: (-caps[n], n))
    return node, range(min(caps[node], left), -1, -1)


def _evenly(left: int, caps: Mapping[int, int]) -> tuple[int, Iterable[int]]:
    """On many nodes: the one with the least room first, so that the others can make up for it."""
    node = min(caps, key=lambda n: (caps[n], n))
    even = min(-(-left // len(caps)), caps[node])
    return node, sorted(range(min(caps[node], left) + 1), key=lambda count: (abs(count - even), count))
