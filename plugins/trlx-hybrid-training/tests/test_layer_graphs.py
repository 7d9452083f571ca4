"""Layers as CUDA graphs: packs that are filled up to equal shapes, and graphs that compute what layers compute."""

import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import attention, layer_graphs, lora
from trlx_hybrid_training.layer_graphs import Chain, Graph, LayerGraphs, Watch
from trlx_hybrid_training.packing import FILLERS, Pack, Sizes
from trlx_hybrid_training.whole_rows import Room, whole, whole_rows

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs are captured on GPUs")
COMPLETION, GROUP = 12, 4
SIZES = Sizes(tokens=200, rows=8, longest=40, copied=100, shared=50, copies=3)


def padded(seed, rows=8, shortest=1, device="cpu"):
    """Groups of rows with one prompt, as TRL pads them: input ids, attention mask."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 98, (rows // GROUP, 10), generator=draw).repeat_interleave(GROUP, 0)
    starts = torch.randint(0, 6, (rows // GROUP, 1), generator=draw).repeat_interleave(GROUP, 0)
    lengths = torch.randint(shortest, COMPLETION + 1, (rows, 1), generator=draw)
    ids = torch.cat([prompts, torch.randint(3, 98, (rows, COMPLETION), generator=draw)], dim=1)
    mask = torch.cat([torch.arange(10)[None] >= starts, torch.arange(COMPLETION)[None] < lengths], dim=1)
    return ids.to(device), mask.long().to(device)


def pack_of(seed, **given):
    return Pack.of(*padded(seed, **given), COMPLETION, shared_below=1.0)


def own(pack):
    """What tells the layers of the pack's rows."""
    return {"segments": pack.segments, "prefixes": pack.prefixes}


def scored(model, pack, **inputs):
    """Log-probs of the completions, and the gradients that some function of them leaves."""
    with attention.packing():
        outputs = model(**pack.inputs | inputs, shift_labels=pack.labels, fused_lm_head=True)
    log_probs = pack.rows(outputs.log_probs)
    (log_probs * torch.arange(COMPLETION, device=log_probs.device)).sum().backward()
    return log_probs.detach()


def taken(model):
    """The gradients, which are removed."""
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def apart(ours, theirs):
    """The largest difference of gradients, as a fraction of the largest value of each."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp_min(1e-30)) for n in theirs)


@pytest.fixture
def model():
    attention.register()
    model = tiny_model("llama", num_hidden_layers=3)
    add_fused_lm_head(model)
    model.config._attn_implementation = attention.NAME
    return model


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "whole rows"])
def test_a_pack_that_is_filled_up_scores_as_before(model, shared):
    pack = Pack.of(*padded(0), COMPLETION, shared_below=1.0 if shared else 0.0)
    plain, gradients = scored(model, pack, **own(pack)), taken(model)
    sizes = pack.sizes.with_room()
    filled = pack.filled(sizes)
    assert sum(filled.segments) == sizes.tokens > sum(pack.segments)
    assert len(filled.segments) == sizes.rows + FILLERS
    assert filled.ends[-1] == sizes.tokens
    assert (scored(model, filled, **own(filled)) - plain).abs().max() < 1e-5
    assert apart(taken(model), gradients) < 1e-4


def test_filled_packs_have_equal_shapes(model):
    packs = [pack_of(seed) for seed in range(4)]
    assert len({pack.sizes for pack in packs}) > 1
    sizes = Sizes(**{name: max(getattr(pack.sizes, name) for pack in packs) for name in Sizes.__slots__}).with_room()
    room = Room(sizes.copied, sizes.shared, sizes.copies)
    shapes = set()
    for pack in packs:
        assert sizes.holds(pack.sizes)
        filled = pack.filled(sizes)
        indices = whole_rows(filled.segments, filled.prefixes, filled.ends.device, room)
        tensors = [v for v in filled.inputs.values() if isinstance(v, torch.Tensor)]
        tensors += [filled.labels, *indices[1:3], *indices.copies[0]]
        shapes.add(tuple(tensor.shape for tensor in tensors))
    assert len(shapes) == 1


def test_indices_with_room_copy_the_same_keys_and_sum_the_same_gradients():
    pack = pack_of(1)
    sizes = pack.sizes.with_room()
    filled = pack.filled(sizes)
    given = filled.segments, filled.prefixes, filled.ends.device
    room = Room(sizes.copied, sizes.shared, sizes.copies)
    plain, roomy = whole_rows(*given), whole_rows(*given, room)
    keys, results = torch.randn(sizes.tokens, 2, 4), []
    for rows in (plain, roomy):
        tensor = keys.clone().requires_grad_()
        copied = whole(tensor, rows, dim=0)
        weights = torch.randn(len(plain.sources), 2, 4, generator=torch.Generator().manual_seed(0))
        garbage = torch.full((len(copied) - len(weights), 2, 4), float("nan"))  # as a kernel may leave it there
        copied.backward(torch.cat([weights, garbage]))
        results.append((copied[: len(plain.sources)].detach(), tensor.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "larger", ["tokens", "rows", "longest", "copied", "shared", "copies"], ids=lambda name: f"more {name}"
)
def test_sizes_hold_what_is_not_larger(larger):
    values = {name: getattr(SIZES, name) for name in Sizes.__slots__}
    assert SIZES.holds(SIZES)
    assert not SIZES.holds(Sizes(**values | {larger: values[larger] + 1}))
    assert SIZES.with_room().holds(SIZES)


def test_sizes_hold_nothing_that_more_rows_would_have_to_fill():
    many = Sizes(tokens=200 + FILLERS * 40 + 1, rows=8, longest=40, copied=100, shared=50, copies=3)
    assert not many.holds(SIZES)


# --- which layers can be captured -----------------------------------------------------------------------------------


def watched(model, pack, **inputs):
    layers = list(model.model.layers)
    with Watch(layers) as watch, attention.packing():
        model(**pack.inputs | own(pack) | inputs, shift_labels=pack.labels, fused_lm_head=True)
    return watch.found()


def test_layers_in_a_row_are_a_chain(model):
    pack = pack_of(0)
    chain = watched(model, pack)
    assert isinstance(chain, Chain)
    assert chain.tokens == sum(pack.segments)
    parameters = sum(p.numel() for p in model.model.layers[0].parameters())
    assert chain.parameters == parameters
    assert chain.gradients == 3 * 4 * parameters
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)


def test_layers_that_are_no_chain_say_why(model):
    pack, layers = pack_of(0), model.model.layers
    handle = layers[1].register_forward_hook(lambda layer, args, out: out + 0)
    assert "input is not the output" not in str(watched(model, pack))  # the hook's result is what the layer returns
    handle.remove()
    handle = layers[1].register_forward_pre_hook(lambda layer, args: (args[0] * 2,), prepend=True)
    assert watched(model, pack) == "a layer's input is not the output of the one before"
    handle.remove()
    handle = layers[2].register_forward_pre_hook(
        lambda layer, args, given: (args, given | {"position_ids": given["position_ids"] + 0}),
        prepend=True,
        with_kwargs=True,
    )
    assert watched(model, pack) == "its layers do not all get the same arguments"
    handle.remove()
    model.model.layers = model.model.layers[:1] + model.model.layers[2:]
    with Watch(layers) as watch, attention.packing():
        model(**pack.inputs | own(pack), shift_labels=pack.labels, fused_lm_head=True)
    assert watch.found() == "its layers are not called one after the other"


def test_layers_that_are_recomputed_tell_nothing(model):
    model.gradient_checkpointing_enable()
    model.train()
    assert watched(model, pack_of(0)) is None


def session_of(model, **given):
    """What the graphs read of a run."""
    policy = Policy(lambda: model, None, model.device)
    ranks = SimpleNamespace(world=1, rank=0)
    args = SimpleNamespace(bf16=True, fp16=False)
    run = {"policy": policy, "ranks": ranks, "args": args, "engine": None, "weight_version": 0}
    return SimpleNamespace(**run | {"free_bytes": lambda: 1 << 40} | given)


def test_a_cpu_has_no_graphs(model):
    graphs = LayerGraphs(session_of(model))
    assert graphs.refused == "there is no CUDA device"
    assert graphs.sizes(pack_of(0)) is None


@pytest.fixture
def chained(model):
    """Graphs of a run whose first pass has shown a chain."""
    graphs = LayerGraphs(session_of(model))
    graphs.refused, graphs._chain = None, Chain(tokens=100, bytes=1 << 20, parameters=1000, gradients=1 << 20)
    return graphs


def test_sizes_are_chosen_once_two_packs_fit_and_kept(chained):
    first = chained.sizes(pack_of(0))
    assert first is None
    chosen = chained.sizes(pack_of(1))
    assert chosen.holds(pack_of(0).sizes)
    assert chosen.holds(pack_of(1).sizes)
    assert chained.sizes(pack_of(2)) is chosen
    resumed = LayerGraphs(chained._session)
    resumed.refused = None
    resumed.load_state(chained.state())
    assert resumed.sizes(pack_of(2)) == chosen


def test_packs_that_became_much_shorter_get_sizes_of_their_own(chained):
    long = [pack_of(seed, rows=32, shortest=12) for seed in range(2)]
    short = [pack_of(seed) for seed in range(2)]
    assert chained.sizes(long[0]) is None
    large = chained.sizes(long[1])
    assert chained.sizes(short[0]) is None
    assert chained.sizes(short[1]).tokens < large.tokens / 2
    assert len(chained.state()) == 2


@pytest.mark.parametrize("short_of", ["memory", "launches"])
def test_no_sizes_are_chosen_where_a_graph_is_not_worth_it(chained, model, short_of):
    if short_of == "memory":  # a sleeping engine is going to need it
        engine = SimpleNamespace(asleep_bytes=(1 << 40) - (4 << 20))
        chained._session.engine = engine
    else:
        chained._chain = Chain(tokens=100, bytes=1, parameters=layer_graphs.WORTH, gradients=1)
    assert [chained.sizes(pack_of(seed)) for seed in range(3)] == [None] * 3


# --- graphs ---------------------------------------------------------------------------------------------------------


class Passes:
    """Losses' passes of a model on a GPU, as `scoring="packed"` runs them."""

    def __init__(self, model):
        self.model = model
        self.graphs = LayerGraphs(session_of(model))
        self.sizes = None

    def forward(self, pack, graphed=True):
        self.sizes = self.graphs.sizes(pack) if graphed else None
        if self.sizes is not None:
            pack = pack.filled(self.sizes)
        inputs = pack.inputs | own(pack) | (self.graphs.inputs(pack, self.sizes) if self.sizes else {})
        running = self.graphs.running(self.sizes) if graphed else torch.enable_grad()
        with torch.autocast("cuda", torch.bfloat16), attention.packing(), running:
            outputs = self.model(**inputs, shift_labels=pack.labels, fused_lm_head=True)
        return pack.rows(outputs.log_probs)

    def loss(self, pack, graphed=True):
        log_probs = self.forward(pack, graphed)
        (log_probs * torch.arange(COMPLETION, device="cuda")).sum().backward()
        return log_probs.detach()

    @property
    def captured(self):
        return [graph for graph in self.graphs._graphs.values() if isinstance(graph, Graph)]


@pytest.fixture(params=["full", "LoRA"])
def passes(model, request):
    model = model.cuda().train()
    if request.param == "LoRA":
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        lora.apply(model)
    return Passes(model)


def of_seed(seed):
    return pack_of(seed, device="cuda")


@pytest.fixture
def captured(passes):
    """Passes after three, of which the last ran as graphs; the gradients are removed."""
    for seed in range(3):
        passes.loss(of_seed(seed))
    taken(passes.model)
    return passes


@ON_GPU
@pytest.mark.filterwarnings("error:The AccumulateGrad node's stream")
def test_graphs_compute_what_layers_compute(passes):
    used = 0
    for seed in range(8):
        plain, theirs = passes.loss(of_seed(seed), graphed=False), taken(passes.model)
        ours, gradients = passes.loss(of_seed(seed)), taken(passes.model)
        assert (ours - plain).abs().max() < 0.02
        assert apart(gradients, theirs) < 0.02
        used += passes.sizes is not None
    assert passes.graphs.refused is None
    assert used >= 6
    assert passes.captured


@ON_GPU
def test_gradients_of_several_passes_add_up(captured):
    gradients = []
    for graphed in (False, True):
        for seed in range(3):
            captured.loss(of_seed(seed), graphed)
        gradients.append(taken(captured.model))
    assert apart(*gradients) < 0.02


@ON_GPU
def test_a_second_pass_before_the_first_ones_gradients_leaves_them_right(captured):
    gradients = []
    for graphed in (False, True):
        both = [captured.forward(of_seed(seed), graphed) for seed in (0, 1)]
        sum((scores * torch.arange(COMPLETION, device="cuda")).sum() for scores in both).backward()
        gradients.append(taken(captured.model))
    assert apart(*gradients) < 0.02


@ON_GPU
def test_parameters_that_moved_are_captured_anew(captured):
    (before,) = captured.captured
    for parameter in captured.model.parameters():
        parameter.data = parameter.data.clone() * 1.5
    theirs = captured.loss(of_seed(4), graphed=False)
    assert (captured.loss(of_seed(4)) - theirs).abs().max() < 0.02
    assert captured.captured != [before]


@ON_GPU
def test_trained_weights_are_used(captured):
    with torch.no_grad():
        for parameter in captured.model.parameters():
            parameter.mul_(1.2)
    theirs = captured.loss(of_seed(4), graphed=False)
    assert (captured.loss(of_seed(4)) - theirs).abs().max() < 0.02


@ON_GPU
def test_graphs_that_compute_something_else_are_refused_by_name(passes, monkeypatch, caplog):
    stock = torch.cuda.make_graphed_callables

    def wrong(*args, **given):
        replay = stock(*args, **given)
        return lambda *tensors: replay(*tensors) * 1.5

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", wrong)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            plain = passes.loss(of_seed(seed), graphed=False)
            assert (passes.loss(of_seed(seed)) - plain).abs().max() < 0.02
    assert "run without CUDA graphs: graphs and layers differ by" in caplog.text
    assert not passes.captured


@ON_GPU
def test_layers_that_cannot_be_captured_run_without_graphs(passes, monkeypatch, caplog):
    layer = type(passes.graphs._layers[0])
    stock = layer.forward

    def waiting(self, hidden, **given):
        hidden.sum().item()  # waits for the device, which a capture cannot
        return stock(self, hidden, **given)

    monkeypatch.setattr(layer, "forward", waiting)
    with caplog.at_level(logging.WARNING):
        for seed in range(4):
            plain, theirs = passes.loss(of_seed(seed), graphed=False), taken(passes.model)
            assert (passes.loss(of_seed(seed)) - plain).abs().max() < 0.02
            assert apart(taken(passes.model), theirs) < 0.02
    assert "run without CUDA graphs" in caplog.text
    torch.cuda.manual_seed(0)
    drawn = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(0)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)  # the failed capture has let go of the generator
