"""LoRA layers that `lora.apply` serves, beside PEFT's own: the same numbers, and nothing else about them changes."""

import copy
import io
import re
from contextlib import nullcontext

import pytest
import torch
import trl
import trlx_hybrid
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import lora

TOKENS = torch.arange(3, 67).view(2, 32)
AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


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
    "config", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}}]
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


def test_the_gradients_are_those_of_the_function():
    torch.manual_seed(0)
    shapes = [(2, 3, 5), (4, 5), (4,), (2, 5), (4, 2)]
    x, weight, bias, a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    for tensor in (x, a, b):
        tensor.requires_grad_()
    arguments = (x, weight, bias, a, b, 1.5, torch.float64)
    assert torch.autograd.gradcheck(lora._LowRank.apply, arguments)


@pytest.mark.parametrize(
    ("base", "adapter", "autocast"),
    [
        pytest.param(torch.bfloat16, torch.float32, True, id="as TRL trains"),
        pytest.param(torch.float32, torch.float32, True, id="float32 master"),
        pytest.param(torch.bfloat16, torch.bfloat16, True, id="bf16 adapters"),
        pytest.param(torch.bfloat16, torch.bfloat16, False, id="without autocast"),
    ],
)
def test_in_bf16_each_layer_is_no_further_from_the_exact_result_than_pefts(base, adapter, autocast, calls):
    """Summed over draws: a single rounding may fall either way."""
    errors = {"peft": {}, "here": {}}
    for seed in range(8):
        torch.manual_seed(seed)
        layer = Linear(nn.Linear(96, 160).to(base), "default", LoraConfig(r=8), r=8, lora_alpha=12)
        layer.base_layer.requires_grad_(False)
        for part in (layer.lora_A, layer.lora_B):
            part["default"].weight.data = torch.randn(part["default"].weight.shape).mul_(0.1).to(adapter)
        x, grad = torch.randn(4, 64, 96).bfloat16(), torch.randn(4, 64, 160).bfloat16()
        exact = layer_results(copy.deepcopy(layer).double(), x.double(), grad.double(), nullcontext())
        context = torch.autocast(**AUTOCAST) if autocast else nullcontext()
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


def test_a_whole_bf16_model_under_autocast_is_within_the_bound_of_its_dtype(calls):
    model = adapted(torch.bfloat16)
    expected = computed(model, torch.autocast(**AUTOCAST))
    lora.apply(model)
    found = computed(model, torch.autocast(**AUTOCAST))
    assert calls == [torch.bfloat16] * 14
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    assert largest_difference(found, expected) < 2**-4


def test_training_takes_the_same_steps():
    runs = []
    for serve in (False, True):
        model, losses = adapted(), []
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


def test_grpo_trains_and_saves_as_with_peft(run, calls):
    """TRL's trainer with its own generation, gradient checkpointing on as by default."""
    from safetensors.torch import load_file

    finished, saved = [], []
    for serve in (False, True):
        one = run(trl.GRPOTrainer, peft_config=LoraConfig(r=4, target_modules="all-linear"), train=False, max_steps=2)
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
    options = {"plugin_options": {"training": {"lora_layers": True}}}
    run(trlx_hybrid.GRPOTrainer, peft_config=LoraConfig(r=4, target_modules="all-linear"), hybrid=options, max_steps=1)
    assert calls
    assert "LoRA layers: 14 of 14 compute in fewer passes" in capsys.readouterr().err


def test_without_adapters_the_option_does_nothing(run, calls, capsys):
    run(trlx_hybrid.GRPOTrainer, hybrid={"plugin_options": {"training": {"lora_layers": True}}}, max_steps=1)
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


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, calls):
    model = adapted()
    expected = computed(model)
    lora.apply(model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = computed(model)
    assert len(calls) == 28  # each layer twice
    assert largest_difference(found, expected) < 1e-5


def test_one_input_of_several_layers_is_saved_once():
    """PEFT's forward saves a copy for each under autocast."""
    sizes = {}
    for serve in (False, True):
        model, seen = adapted(torch.bfloat16), {}
        if serve:
            lora.apply(model)
        layer = model.base_model.model.model.layers[0].self_attn
        x = torch.randn(2, 32, 128).bfloat16().requires_grad_()

        def saved(tensor, seen=seen):
            seen[tensor.untyped_storage().data_ptr()] = tensor  # kept, or another tensor takes its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t), torch.autocast(**AUTOCAST):
            _ = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes[serve] = sum(t.untyped_storage().nbytes() for at, t in seen.items() if at not in parameters)
        copies = [t for at, t in seen.items() if at not in parameters and t.numel() == x.numel()]
        assert len(copies) == (1 if serve else 3)
    assert sizes[True] < sizes[False]


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


def test_sharded_by_fsdp2_gradients_are_the_same(calls, tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def gradients(model):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}

    expected, model = gradients(adapted()), adapted()
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


# --- what is not served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param({"use_dora": True}, r"a variant of LoRA \(DoraLinearVariant\)", id="DoRA"),
        pytest.param({"lora_bias": True}, "B has a bias", id="lora_bias"),
        pytest.param({"bias": "all"}, "its base is trained", id="bias"),
        pytest.param({"lora_dropout": 0.5}, "its input is dropped", id="dropout"),
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


def test_dropout_is_refused_only_while_it_drops(calls):
    model = adapted(lora_dropout=0.5).eval()
    expected = computed(model)
    assert lora.apply(model) == []
    assert largest_difference(computed(model), expected) < 1e-5
    assert len(calls) == 14
    torch.manual_seed(3)
    found = computed(model.train())
    assert len(calls) == 14
    plain = adapted(lora_dropout=0.5).train()
    torch.manual_seed(3)
    assert torch.equal(found["logits"], computed(plain)["logits"])


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
