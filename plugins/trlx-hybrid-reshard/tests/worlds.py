"""Random models and layouts, and an oracle that cuts real arrays the way torch and vLLM do."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from trlx_hybrid_reshard.layouts import MeshLayout, Model, Parameter, Stage
from trlx_hybrid_reshard.sharding import Sharding

DEPTH = 3
PADDING = 8


@dataclass(frozen=True, kw_only=True)
class Permuted(MeshLayout):
    """With another rank at each position: plans count on no order of the ranks."""

    mesh: tuple[int, ...]

    def sharding(self, parameter):
        found, at = MeshLayout.sharding(self, parameter), np.argsort(self.mesh)
        return Sharding(found.world, found.parts, tuple(c[at] for c in found.coordinates), found.held[at])


vocabulary = st.builds(
    lambda rows, hidden, stage: Parameter(
        name="embed", shape=(rows, hidden), stage=stage, tp_dim=0, vocabulary=True, unit="rows"
    ),
    st.integers(1, 20),
    st.integers(1, 3),
    st.sampled_from([Stage.FIRST, Stage.LAST, Stage.ENDS]),
)
layers = st.sampled_from([(range(DEPTH), 0), ((1,), DEPTH), ((0, 2), DEPTH)])


@st.composite
def layered(draw, tp):
    """A parameter class of the layers that `tp` slices; sizes along the other dimensions are arbitrary."""
    kind = draw(st.sampled_from(["gate_up", "column", "kv", "row", "down", "replicated"]))
    of, depth = draw(layers)
    odd, block = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    given = {"name": kind, "layers": of, "depth": depth}
    if kind == "column":
        return Parameter(shape=(tp * block, odd), tp_dim=0, tp_units=tp * draw(st.sampled_from([1, block])), **given)
    if kind == "kv":
        heads = draw(st.sampled_from([h for h in (1, 2, 4, 8) if tp % h == 0 or h % tp == 0]))
        return Parameter(shape=(heads * block,), tp_dim=0, tp_units=heads, replicable=True, **given)
    if kind == "row":
        return Parameter(shape=(odd, tp * block), tp_dim=1, **given)
    if kind == "replicated":
        return Parameter(shape=(odd,), **given)
    if kind == "gate_up":
        return Parameter(shape=(odd, 2 * tp * block, 2), tp_dim=1, segments=2, expert_dim=0, **given)
    return Parameter(shape=(odd, 2, tp * block), tp_dim=2, expert_dim=0, **given)


@st.composite
def layouts(draw, world, tp, *, served):
    """A layout of `world` ranks whose tensor parallelism is `tp`, or 1 and FSDP."""
    rest = world // tp
    pp = draw(st.sampled_from([p for p in (1, 1, 1, 2, 3) if rest % p == 0]))
    rest //= pp
    fsdp = 1 if served else draw(st.sampled_from([f for f in (2, 4, 3, 1, 6, 8) if rest % f == 0]))
    dp = rest // fsdp
    ep = draw(st.sampled_from([1] * 4 + [tp * d for d in (1, 2, 3) if dp % d == 0])) if served else 1
    layout = MeshLayout(dp=dp, pp=pp, fsdp=fsdp, tp=tp, ep=ep, vocab_multiple=PADDING if served else 1)
    return permuted(draw, layout)


def permuted(draw, layout):
    """The layout, or the same with other ranks in its places."""
    if not draw(st.booleans()):
        return layout
    given = {k: getattr(layout, k) for k in ("dp", "pp", "fsdp", "tp", "ep", "vocab_multiple")}
    return Permuted(**given, mesh=tuple(draw(st.permutations(range(layout.world)))))


@st.composite
def reshards(draw):
    """(model, training layout, rollout layout, ranks per node)."""
    world = draw(st.sampled_from([8, 4, 6, 8, 4, 2, 3, 1]))
    tp = draw(st.sampled_from([t for t in (2, 4, 2, 1) if world % t == 0]))
    inner = draw(st.sampled_from([1] * 5 + [tp]))
    train = draw(layouts(world, inner, served=False))
    parameters = [
        draw(vocabulary.filter(lambda p: p.shape[0] % inner == 0)),
        *draw(st.lists(layered(tp), min_size=1, max_size=4)),
    ]
    dims = []
    for i, p in enumerate(parameters):
        even = [d for d, size in enumerate(p.shape) if d and size % train.fsdp == 0 and d != p.tp_dim]
        if even and draw(st.booleans()):
            dims.append((f"{i}.{p.name}", draw(st.sampled_from(even))))
    named = tuple(_renamed(p, f"{i}.{p.name}") for i, p in enumerate(parameters))
    train = replace(train, shard_dims=tuple(dims))
    node = draw(st.sampled_from([n for n in (1, 2, 4, world) if world % n == 0]))
    return Model(name="random", parameters=named), train, draw(layouts(world, tp, served=True)), node


def _renamed(p, name):
    return replace(p, name=name)


def held(layout, parameter, rank):
    """The part of `whole(parameter)` that a rank holds, cut from the real array; None if it has no such parameter.

    Padding is -1. Written without the code under test.
    """
    position = layout.mesh.index(rank) if isinstance(layout, Permuted) else rank
    tp, position = position % layout.tp, position // layout.tp
    fsdp, position = position % layout.fsdp, position // layout.fsdp
    pp, dp = position % layout.pp, position // layout.pp
    array = whole(parameter)
    if parameter.stage is Stage.LAYERS:
        depth = parameter.depth or len(parameter.layers)
        sizes = [depth // layout.pp] * layout.pp
        for i in range(2, depth % layout.pp + 2):
            sizes[-i] += 1
        mine = range(sum(sizes[:pp]), sum(sizes[: pp + 1]))
        array = array[[i for i, number in enumerate(parameter.layers) if number in mine]]
    else:
        ends = {Stage.FIRST: [0], Stage.LAST: [layout.pp - 1], Stage.ENDS: [0, layout.pp - 1]}[parameter.stage]
        if pp not in ends:
            return None
    if layout.ep > 1 and parameter.expert_dim is not None:
        array = np.array_split(array, layout.ep, axis=1)[(dp * layout.tp + tp) % layout.ep]
    elif parameter.tp_dim is not None:
        array = _sliced(array, parameter, layout, tp)
    dim = dict(layout.shard_dims).get(parameter.name, 0) + 1
    size = -(-array.shape[dim] // layout.fsdp)
    return np.take(array, range(min(size * fsdp, array.shape[dim]), min(size * (fsdp + 1), array.shape[dim])), axis=dim)


def _sliced(array, parameter, layout, tp):
    dim, ways = parameter.tp_dim + 1, layout.tp
    if parameter.vocabulary and -array.shape[dim] % layout.vocab_multiple:
        padding = [(0, 0)] * array.ndim
        padding[dim] = (0, -array.shape[dim] % layout.vocab_multiple)
        array = np.pad(array, padding, constant_values=-1)
    if parameter.replicable and ways > parameter.tp_units:
        tp, ways = tp * parameter.tp_units // ways, parameter.tp_units
    blocks = np.split(array, parameter.segments, axis=dim)
    return np.concatenate([np.split(block, ways, axis=dim)[tp] for block in blocks], axis=dim)


def boxes(sharding, rank):
    """A rank's piece as half-open ranges per dimension: no box if it holds nothing, several for fused blocks."""
    if not sharding.holds(rank):
        return []
    return list(itertools.product(*([(int(a), int(b)) for a, b in part if b > a] for part in sharding.piece(rank))))


def whole(parameter):
    """(layers, *shape), every element its own number."""
    return np.arange(parameter.elements).reshape(parameter.extent)
