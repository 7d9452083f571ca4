"""LoRA layers that `lora.apply` serves, beside PEFT's own: the same numbers, and nothing else about them changes."""

import copy
import io
import math
import re
from contextlib import nullcontext

import pytest
import torch
import trl
import trlx_hybrid
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.helpers import disable_input_dtype_casting
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import lora

TOKENS = torch.arange(3, 67).view(2, 32)
DROPOUT = [pytest.param({}, id="no dropout"), pytest.param({"lora_dropout": 0.3}, id="dropout")]
AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU sums and rounds by other kernels")
SERVED = {"plugin_options": {"training": {"lora_layers": True}}}


def adapted(dtype=torch.float32, adapter_dtype=torch.float32, architecture="qwen2", **config):
    """A tiny model with biases in q, k and v, and an adapter on all linear layers whose B is not zero."""
    fields = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | config
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(architecture, dtype=dtype), LoraConfig(**fields))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape) * 0.1).to(adapter_dtype)
    return model


def computed(model, context=None, tokens=TOKENS, wanted=None):
    """Logits, the gradients of the adapters, and of the embeddings: x of the first layer."""
    model.zero_grad()
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
    torch.manual_seed(2)
    with context or nullcontext():
        logits = model(inputs_embeds=embeddings).logits
        loss = (logits.float() * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum() / 100
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "embeddings": embeddings.grad, **found}


def layer_results(layer, x, grad, context):
    x = x.clone().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    torch.manual_seed(2)
    with context:
        out = layer(x)
    out.backward(grad.to(out.dtype))
    return {
        "out": out.detach(),
        "x": x.grad,
        "A": layer.lora_A["default"].weight.grad,
        "B": layer.lora_B["default"].weight.grad,
    }


def on_random_rows(layer):
    torch.manual_seed(1)
    sizes = [layer.base_layer.in_features, layer.base_layer.out_features]
    return layer_results(layer, *(torch.randn(2, 32, size) for size in sizes), nullcontext())


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(
        ((found[n].double() - expected[n].double()).abs().max() / expected[n].double().abs().max()).item()
        for n in found
    )


def served(model):
    """The LoRA layers that have another forward than PEFT's."""
    return [name for name, module in model.named_modules() if isinstance(module, Linear) and "forward" in vars(module)]


@pytest.fixture
def calls(monkeypatch):
    """The dtypes that layers were computed in, one entry for each call that did not go to PEFT's forward."""
    seen, real = [], lora._LowRank.apply

    def noted(*arguments):
        seen.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(lora._LowRank, "apply", noted)
    return seen


# --- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
        {"lora_dropout": 0.05},
        {"lora_dropout": 0.5},
    ],
)
def test_in_float32_outputs_and_gradients_are_pefts(architecture, config, calls):
    """Of each layer within 1e-6; of a model a little more: what its first layer rounds grows in the others."""
    model = adapted(architecture=architecture, **config)
    expected = computed(model)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    one_by_one = [on_random_rows(layer) for layer in layers]
    assert lora.apply(model) == []
    for layer, results in zip(layers, one_by_one):
        assert largest_difference(on_random_rows(layer), results) < 1e-6
    assert calls == [torch.float32] * 14  # 2 layers × 7 modules
    assert largest_difference(computed(model), expected) < 1e-5
    assert len(calls) == 28


@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_the_gradients_are_those_of_the_function(drop):
    torch.manual_seed(0)
    shapes = [(2, 3, 5), (4, 5), (4,), (2, 5), (4, 2)]
    x, weight, bias, a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    for tensor in (x, a, b):
        tensor.requires_grad_()

    def seeded(*arguments):
        torch.manual_seed(0)
        return lora._LowRank.apply(*arguments, 1.5, drop, torch.float64)

    assert torch.autograd.gradcheck(seeded, (x, weight, bias, a, b))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16 autocast"])
def test_the_same_random_numbers_are_drawn_as_by_peft(autocast, calls):
    """Of each layer in the order of the forward pass, and none besides."""
    model = adapted(torch.bfloat16 if autocast else torch.float32, lora_dropout=0.3)
    context = torch.autocast(**AUTOCAST) if autocast else nullcontext()
    theirs, ours = [], []

    def kept(module, given):
        with torch.random.fork_rng(devices=[]):
            theirs.append(nn.functional.dropout(torch.ones_like(given[0]), module.p) != 0)

    layers = [module for module in model.modules() if isinstance(module, Linear)]
    hooks = [layer.lora_dropout["default"].register_forward_pre_hook(kept) for layer in layers]
    expected = computed(model, context)
    state = torch.get_rng_state()
    for hook in hooks:
        hook.remove()
    lora.apply(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ours.append(t) or t, lambda t: t):
        found = computed(model, context)
    assert len(calls) == 14
    assert torch.equal(torch.get_rng_state(), state)
    masks = [t for t in ours if t.dtype == torch.bool]
    assert len(masks) == len(theirs) == 14
    assert all(torch.equal(one, other.flatten(0, 1)) for one, other in zip(masks, theirs))
    assert largest_difference(found, expected) < (2**-4 if autocast else 1e-5)


class Dropped(nn.Module):
    """Dropout of what `mask` says."""

    def __init__(self, mask, share):
        super().__init__()
        self.mask, self.scale = mask, 1 / (1 - share)

    def forward(self, x):
        return x * self.mask * self.scale


@pytest.mark.parametrize(("device", "drop"), [("cpu", 0.0), ("cpu", 0.05), pytest.param("cuda", 0.0, marks=ON_GPU)])
@pytest.mark.parametrize(
    ("base", "adapter", "given", "autocast"),
    [
        pytest.param(torch.bfloat16, torch.float32, torch.bfloat16, True, id="as TRL trains"),
        pytest.param(torch.float32, torch.float32, torch.bfloat16, True, id="float32 master"),
        pytest.param(torch.float32, torch.float32, torch.float32, True, id="float32 master and input"),
        pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, True, id="bf16 adapters"),
        pytest.param(torch.bfloat16, torch.bfloat16, torch.bfloat16, False, id="without autocast"),
    ],
)
def test_in_bf16_each_layer_is_no_further_from_the_exact_result_than_pefts(
    base, adapter, given, autocast, device, drop, calls
):
    """Summed over draws: a single rounding may fall either way. On a GPU, PEFT may drop other elements."""
    errors = {"peft": {}, "here": {}}
    for seed in range(8):
        torch.manual_seed(seed)
        config = LoraConfig(r=8, lora_dropout=drop)
        layer = Linear(nn.Linear(96, 160).to(base), "default", config, r=8, lora_alpha=12)
        layer.base_layer.requires_grad_(False)
        for part in (layer.lora_A, layer.lora_B):
            part["default"].weight.data = torch.randn(part["default"].weight.shape).mul_(0.1).to(adapter)
        x, grad = (torch.randn(4, 64, size).to(device) for size in (96, 160))
        layer, x, grad = layer.to(device), x.to(given), grad.bfloat16()
        reference = copy.deepcopy(layer).double()
        if drop:
            torch.manual_seed(2)
            reference.lora_dropout["default"] = Dropped(torch.native_dropout(x, drop, True)[1], drop)
        exact = layer_results(reference, x.double(), grad.double(), nullcontext())
        context = torch.autocast(**AUTOCAST | {"device_type": device}) if autocast else nullcontext()
        expected = layer_results(layer, x, grad, context)
        assert lora.apply(layer) == []
        found = layer_results(layer, x, grad, context)
        for name, reference in exact.items():
            assert found[name].dtype == expected[name].dtype, name
            scale = reference.abs().max().item()
            for arm, results in (("peft", expected), ("here", found)):
                error = (results[name].double() - reference).norm().item()
                errors[arm][name] = errors[arm].get(name, 0.0) + error
            assert (found[name].double() - expected[name].double()).abs().max().item() < 2**-6 * scale, name
    assert calls == [torch.bfloat16] * 8
    for name in errors["here"]:
        assert errors["here"][name] <= errors["peft"][name] * 1.001, (name, errors)


@pytest.mark.parametrize("config", DROPOUT)
def test_a_whole_bf16_model_under_autocast_is_within_the_bound_of_its_dtype(config, calls):
    model = adapted(torch.bfloat16, **config)
    expected = computed(model, torch.autocast(**AUTOCAST))
    lora.apply(model)
    found = computed(model, torch.autocast(**AUTOCAST))
    assert calls == [torch.bfloat16] * 14
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert largest_difference(found, expected) < 2**-4


@pytest.mark.parametrize("config", DROPOUT)
def test_training_takes_the_same_steps(config):
    runs = []
    for serve in (False, True):
        model, losses = adapted(**config), []
        if serve:
            lora.apply(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for _ in range(4):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append(losses)
    assert runs[1] == pytest.approx(runs[0], abs=1e-5)
    assert runs[0][-1] < runs[0][0]


@pytest.mark.parametrize("config", DROPOUT)
def test_grpo_trains_and_saves_as_with_peft(config, run, calls):
    """TRL's trainer with its own generation, gradient checkpointing on as by default."""
    from safetensors.torch import load_file

    finished, saved = [], []
    for serve in (False, True):
        adapter = LoraConfig(r=4, target_modules="all-linear", **config)
        one = run(trl.GRPOTrainer, peft_config=adapter, train=False, max_steps=2)
        if serve:
            assert lora.apply(one.trainer.model) == []
        one.trainer.train()
        one.trainer.save_model()
        finished.append(one)
        saved.append(load_file(f"{one.trainer.args.output_dir}/adapter_model.safetensors"))
    assert calls
    peft, here = finished
    assert here.recorder.completions == peft.recorder.completions
    for found, expected in zip(here.logs, peft.logs, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert (
        largest_difference(*reversed(saved)) < 1e-3
    )  # AdamW's first steps: the sign of a gradient counts, not its size


def test_an_option_switches_them_on_and_the_header_counts_them(run, calls, capsys):
    run(trlx_hybrid.GRPOTrainer, peft_config=LoraConfig(r=4, target_modules="all-linear"), hybrid=SERVED, max_steps=1)
    assert calls
    assert "LoRA layers: 14 of 14 compute in fewer passes\n" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trls_default_adapters_are_served(dtype, run, calls, capsys):
    """r 16 on q and v, `lora_dropout` 0.05, under bf16 autocast; its base is float32 unless `dtype` says otherwise."""
    config = trl.get_peft_config(trl.ModelConfig(use_peft=True, dtype=dtype))
    assert config.lora_dropout > 0
    model = tiny_model(dtype=getattr(torch, dtype))
    finished = run(trlx_hybrid.GRPOTrainer, model=model, peft_config=config, hybrid=SERVED, bf16=True, max_steps=2)
    assert "LoRA layers: 4 of 4 compute in fewer passes\n" in capsys.readouterr().err
    assert torch.bfloat16 in calls  # TRL's own generation is without autocast
    assert all(math.isfinite(log["loss"]) and log["grad_norm"] > 0 for log in finished.logs if "loss" in log)
    finished.trainer.save_model()
    loaded = PeftModel.from_pretrained(tiny_model(), finished.trainer.args.output_dir)
    saved, trained = (get_peft_model_state_dict(each) for each in (loaded, finished.trainer.model))
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in trained)
    assert any(weight.any() for name, weight in saved.items() if "lora_B" in name)


def test_without_adapters_the_option_does_nothing(run, calls, capsys):
    run(trlx_hybrid.GRPOTrainer, hybrid=SERVED, max_steps=1)
    assert not calls
    assert "LoRA layers: 0 of 0" in capsys.readouterr().err


# --- what is around the layer ---------------------------------------------------------------------------------------


def test_modules_parameters_and_saved_adapters_stay_pefts(tmp_path):
    model = adapted()
    before = {n: type(m) for n, m in model.named_modules()}, {n: id(p) for n, p in model.named_parameters()}
    state = model.state_dict()
    lora.apply(model)
    assert ({n: type(m) for n, m in model.named_modules()}, {n: id(p) for n, p in model.named_parameters()}) == before
    assert model.state_dict().keys() == state.keys()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("qwen2"), str(tmp_path))
    assert torch.allclose(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)
    model.merge_and_unload()  # PEFT replaces the layers by their merged bases
    assert served(model) == []


def test_a_model_may_change_the_output_in_place():
    """As OLMo clips its queries, keys and values."""
    model = adapted(architecture="olmo")
    model.config.clip_qkv = 0.5
    expected = computed(model)
    assert lora.apply(model) == []
    assert largest_difference(computed(model), expected) < 1e-5


def test_a_copy_computes_with_its_own_parameters_and_a_pickled_model_is_pefts(calls):
    model = adapted()
    lora.apply(model)
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    assert torch.allclose(twin(TOKENS).logits, tiny_model("qwen2")(TOKENS).logits, rtol=0, atol=1e-5)
    assert len(calls) == 14

    file = io.BytesIO()
    torch.save(model, file)
    assert b"trlx_hybrid_training" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    calls.clear()
    assert torch.allclose(loaded(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=1e-5)
    assert len(calls) == 14  # the model's, not what was loaded
    assert lora.apply(loaded) == []


@pytest.mark.parametrize("config", DROPOUT)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, config, calls):
    model = adapted(**config)
    expected = computed(model)
    lora.apply(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = computed(model)
    assert len(calls) == 28  # each layer twice
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("config", DROPOUT)
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_one_input_of_several_layers_is_saved_once(base, config):
    """Where it comes in the dtype that is computed in; elsewhere a copy for each layer, as with PEFT under autocast.
    With dropout a mask for each of one byte per element; no input is saved both as it is and dropped."""
    sizes = {}
    for serve in (False, True):
        model, seen = adapted(base, **config), {}
        if serve:
            lora.apply(model)
        layer = model.base_model.model.model.layers[0].self_attn
        x = torch.randn(2, 33, 128).to(base).requires_grad_()

        def saved(tensor, seen=seen):
            seen[tensor.untyped_storage().data_ptr()] = tensor  # kept, or another tensor takes its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t), torch.autocast(**AUTOCAST):
            given = x.view_as(x)  # of a leaf autocast would keep the cast
            _ = [layer.q_proj(given), layer.k_proj(given), layer.v_proj(given)]
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes[serve] = sum(t.untyped_storage().nbytes() for at, t in seen.items() if at not in parameters)
        inputs = [t.dtype for at, t in seen.items() if at not in parameters and t.numel() == x.numel()]
        if serve:
            assert inputs.count(torch.bfloat16) == (1 if base == torch.bfloat16 else 3)
            assert inputs.count(torch.bool) == (3 if config else 0)
            assert len(inputs) == inputs.count(torch.bfloat16) + inputs.count(torch.bool)
        else:
            assert inputs.count(torch.bfloat16) == 3
    assert sizes[True] < sizes[False] if base == torch.bfloat16 or config else sizes[True] == sizes[False]


class Bytes(TorchDispatchMode):
    """Bytes that operations read and write of tensors that have a row for each token, and how often `shape` is cast."""

    def __init__(self, tokens, shape=None):
        super().__init__()
        self.tokens, self.shape, self.moved, self.casts = tokens, shape, 0, 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        keywords = keywords or {}
        out = operation(*arguments, **keywords)
        name = operation.overloadpacket.__name__
        written = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
        if operation.is_view or "empty" in name or name == "_unsafe_view":
            return out
        read = [t for t in arguments if isinstance(t, torch.Tensor)]
        if name.startswith("addmm") and keywords.get("beta") == 0:
            read = read[1:]
        self.moved += sum(t.numel() * t.element_size() for t in read + written if self.tokens in t.shape)
        self.casts += name == "_to_copy" and arguments[0].shape == self.shape
        return out


def moved(layer, tokens, dtype=torch.bfloat16):
    """Bytes for each token in a forward pass under autocast, and in its backward pass."""
    x = torch.randn(tokens, layer.in_features, dtype=dtype, requires_grad=True)
    with Bytes(tokens) as forward, torch.autocast(**AUTOCAST):
        out = layer(x.view_as(x))  # of a leaf autocast would keep the cast
    with Bytes(tokens) as backward:
        out.backward(torch.ones_like(out))
    return torch.tensor([forward.moved, backward.moved]) / tokens


@pytest.mark.parametrize(
    ("serve", "drop", "expected"),
    [
        (False, 0.0, [(14, 12), (22, 8)]),
        (False, 0.05, [(23, 12), (31, 8)]),
        (True, 0.0, [(2, 4), (6, 4)]),
        (True, 0.05, [(7, 4), (16, 4)]),
    ],
    ids=["PEFT", "PEFT, dropout", "here", "here, dropout"],
)
def test_the_bytes_that_are_moved_are_those_of_the_table(serve, drop, expected, monkeypatch):
    """For each column of input and output, beyond the products by W; with the kernel for dropout that a GPU takes."""
    monkeypatch.setattr(
        nn.functional, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]
    )

    def extra(inputs, outputs, tokens=509):
        base = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        layer = Linear(base, "default", LoraConfig(r=2, lora_dropout=drop), r=2, lora_alpha=2)
        for part in (layer.lora_A, layer.lora_B):
            part["default"].float()
        if serve:
            assert lora.apply(layer) == []
        return moved(layer, tokens) - moved(base, tokens)

    least = extra(32, 64)
    of_inputs, of_outputs = (extra(96, 64) - least) / 64, (extra(32, 128) - least) / 64
    assert [*zip(of_inputs.tolist(), of_outputs.tolist())] == expected


@pytest.mark.parametrize("serve", [False, True], ids=["PEFT", "here"])
def test_a_float32_base_is_cast_once_for_a_forward_and_its_backward_pass(serve):
    """Autocast keeps casts of trained parameters only."""
    layer = Linear(nn.Linear(24, 40).requires_grad_(False), "default", LoraConfig(r=2), r=2, lora_alpha=2)
    if serve:
        assert lora.apply(layer) == []
    x = torch.randn(8, 24, requires_grad=True)
    with Bytes(8, layer.base_layer.weight.shape) as seen:
        with torch.autocast(**AUTOCAST):
            layer(x)
            out = layer(x)
        assert seen.casts == 2
        out.sum().backward()
    assert seen.casts == 2


@pytest.mark.parametrize("config", DROPOUT)
def test_sharded_by_fsdp2_gradients_are_the_same(config, calls, tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def gradients(model):
        torch.manual_seed(2)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}

    expected, model = gradients(adapted(**config)), adapted(**config)
    lora.apply(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found = gradients(model)
        assert lora.apply(model) == []  # while its parameters are shards
    finally:
        dist.destroy_process_group()
    assert calls == [torch.float32] * 14
    assert largest_difference(found, expected) < 1e-5


def test_pefts_own_switch_spares_its_casts_to_the_same_bits():
    """Under autocast, of layers that stay PEFT's."""

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), given=None):
            self.count += "_to_copy" in str(function) and (given or {}).get("dtype") == torch.float32
            return function(*arguments, **(given or {}))

    model, layers = adapted(torch.bfloat16), 14
    with Casts() as stock:
        cast = computed(model, torch.autocast(**AUTOCAST))
    with disable_input_dtype_casting(model), Casts() as spared:
        same = computed(model, torch.autocast(**AUTOCAST))
    assert stock.count - spared.count >= layers
    assert cast.keys() == same.keys()
    assert all(torch.equal(cast[name], same[name]) for name in cast)


def test_plain_tensors_in_the_place_of_parameters_are_computed_with(calls):
    """Set over the parameters of the module, or with those taken out, as FSDP1 does both; or as buffers."""
    model = adapted(target_modules=["q_proj"])
    lora.apply(model)
    expected = model(TOKENS).logits
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    linears = [part for layer in layers for part in layer.modules() if type(part) is nn.Linear]
    held = [(linear, name, p) for linear in linears for name, p in linear.named_parameters()]
    for linear, name, parameter in held:
        vars(linear)[name] = parameter.detach().clone()
        nn.init.zeros_(parameter)
    assert torch.equal(model(TOKENS).logits, expected)
    for linear, name, _ in held:
        del linear._parameters[name]
    assert torch.equal(model(TOKENS).logits, expected)
    for linear, name, _ in held:
        linear.register_buffer(name, vars(linear).pop(name))
    assert torch.equal(model(TOKENS).logits, expected)
    assert len(calls) == 8


# --- what is not served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param({"use_dora": True}, r"a variant of LoRA \(DoraLinearVariant\)", id="DoRA"),
        pytest.param({"lora_bias": True}, "B has a bias", id="lora_bias"),
        pytest.param({"bias": "all"}, "its base is trained", id="bias"),
        pytest.param({"lora_dropout": 1.0}, "or all of it", id="all is dropped"),
    ],
)
def test_another_computation_is_refused_for_each_layer_with_the_reason(config, reason):
    model = adapted(target_modules=["q_proj"], **config).train()
    unserved = lora.apply(model)
    assert [name.rpartition(".")[2] for name, _ in unserved] == ["q_proj"] * 2
    assert all(re.search(reason, why) for _, why in unserved)
    assert served(model) == []


def test_only_what_is_refused_keeps_pefts_forward():
    model = adapted(target_modules=["q_proj", "embed_tokens"])
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    layers[1].register_forward_hook(lambda *_: None)  # called outside of forward: no reason to refuse
    layers[1].base_layer.register_forward_hook(lambda *_: None)
    unserved = dict(lora.apply(model))
    (embedding, hooked) = unserved
    assert "PEFT's Embedding" in unserved[embedding]
    assert "hooks" in unserved[hooked]
    assert "forward" in vars(layers[0])


def test_a_quantised_base_is_refused():
    class Int8Linear(nn.Linear):
        pass

    model = adapted(target_modules=["q_proj"])
    first, second = [m for m in model.modules() if isinstance(m, Linear)]
    first.base_layer.__class__ = Int8Linear
    second.base_layer.weight = nn.Parameter(second.base_layer.weight.to(torch.int8), requires_grad=False)
    (_, one), (_, other) = lora.apply(model)
    assert "Int8Linear" in one
    assert "quantised (torch.int8)" in other


def test_a_model_without_adapters_is_left_alone():
    assert lora.apply(tiny_model("qwen2")) == []


def test_without_autocast_a_bf16_model_with_float32_adapters_computes_as_peft_does(calls):
    model = adapted(torch.bfloat16)
    expected = computed(model)
    lora.apply(model)
    found = computed(model)
    assert calls == []
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_dropout_drops_in_training_only(calls):
    model = adapted(lora_dropout=0.5)
    assert lora.apply(model) == []
    dropped = computed(model)
    expected = computed(adapted())
    assert largest_difference(dropped, expected) > 1e-2
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert largest_difference(computed(model.eval()), expected) < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    assert len(calls) == 28


@pytest.mark.parametrize("state", ["disabled", "merged", "several", "mixed", "other"])
def test_what_changes_from_call_to_call_is_looked_at_in_each(state, calls):
    model, plain = adapted(), adapted()
    lora.apply(model)
    results = []
    for each in (plain, model):
        kwargs = {}
        if state in ("several", "mixed", "other"):
            torch.manual_seed(5)
            each.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        if state == "several":
            each.base_model.set_adapter(["default", "other"])
        elif state == "mixed":
            kwargs = {"adapter_names": ["default", "__base__"]}
        elif state == "other":
            each.set_adapter("other")
        elif state == "merged":
            each.merge_adapter()
        with each.disable_adapter() if state == "disabled" else nullcontext(), torch.no_grad():
            results.append(each.eval()(TOKENS, **kwargs).logits)
    assert torch.allclose(results[1], results[0], rtol=0, atol=1e-5)
    assert len(calls) == (14 if state == "other" else 0)
    calls.clear()
    if state == "merged":
        model.unmerge_adapter()
    model.set_adapter("default")
    assert torch.allclose(model(TOKENS).logits, adapted()(TOKENS).logits, rtol=0, atol=1e-4)
    assert len(calls) == 14


def test_a_frozen_adapter_and_inputs_without_gradients(calls):
    """What evaluates, and a reference adapter."""
    model = adapted()
    lora.apply(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name and "mlp" in name)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    with torch.inference_mode():
        assert not model(TOKENS).logits.requires_grad
    assert len(calls) == 28
