"""The forward and backward pass of PEFT's plain LoRA layer, with fewer reads and writes of its input and output.

`apply(model)` replaces the `forward` of each `peft.tuners.lora.Linear` that this module can compute. Nothing else
changes: modules, types, parameters and their names stay PEFT's, so state dicts, saved adapters, optimizers, DDP, FSDP2
and gradient checkpointing see the same model. A layer that is pickled and loaded again has PEFT's `forward`.

**What is computed.** The inputs are `x` (tokens × in), frozen `W` (out × in) and `bias`, `A` (r × in), `B` (out × r)
and the scaling `s`. The symbol `d` stands for `x`; in training with a `lora_dropout` of p it stands for the output of
`torch.nn.Dropout`, `mask · x / (1 - p)`. The gradient of `y` is `g`:

    h = d Aᵀ          y = x Wᵀ + bias, then y += s · h Bᵀ within that product's epilogue
    l = g B           dx = g W, then dx += s · l A            dA = s · lᵀ d            dB = s · gᵀ h

With dropout dx = mask · (s / (1 - p) · l A), then dx += g W. Each product sums in float32 and rounds once. PEFT's
forward rounds three times: after the product by Bᵀ, after `* scaling` and after `result +`. On a GPU the gradients of
float32 adapters are never rounded to bf16.

**Bytes.** The table shows the bytes of device memory that a layer's adapter moves for each token. The products by W are
left out, because PEFT and this module move the same bytes for them. The dtypes are those that PEFT gives a bf16 model:
autocast to bf16, the base in bf16, adapters in float32. In the table, `in` and `out` stand for the numbers of the
layer's inputs and outputs per token: "2 in + 4 out" is 2 bytes for each input and 4 for each output.

| | PEFT | here |
|---|---|---|
| forward | 14 in + 12 out (x to float32 and back, product by A; by B, `* s`, `+`) | 2 in + 4 out |
| backward | 22 in + 8 out (the same casts of dx, and its sum; `* s`, two products) | 6 in + 4 out |
| forward, dropout | 23 in + 12 out (PEFT drops from the float32 copy) | 7 in + 4 out |
| backward, dropout | 31 in + 8 out | 16 in + 4 out |
| saved | 2 in + 2 r, a copy for each layer | 2 in + 2 r, `in` once for layers with one input |
| saved, dropout | 3 in + 2 r, `d` and mask of each layer | 3 in + 2 r, 2 `in` once for layers with one input |
| kernels, forward and backward | 8 and 10; dropout 9 and 11 | 4 and 6; dropout 5 and 8 |

The forward pass saves `x` itself for the backward pass. It also saves `h`, which has r columns; without `h`, `x` would
be read once more. With dropout it also saves the mask, a byte for each element, and the backward pass makes `d` again
from `x` and the mask. Saving `d` as well would save 5 in of the backward pass, but each layer would hold a copy.
Drawing the mask again from a seed would save its byte. But then the backward pass would have to set the generator's
state and draw all numbers again, and would draw other numbers if saved tensors come back with other strides.

If `x` comes in float32, as from the norms of a float32 base, dropout is applied before the cast to bf16; otherwise `x`
would be rounded twice. The forward pass then moves 17 in, as many as PEFT's. No other layer uses the bf16 copy that the
cast makes, so `d` is saved in place of the copy. That takes as much memory as PEFT takes, and the backward pass moves
11 in.

**Example.** A layer of Qwen2-1.5B has seven linear modules, with 18,176 columns of inputs and 23,040 of outputs in all.
The next table is for its 28 layers and 40,960 tokens: 64 rows of 128 + 512 tokens. The seconds are predicted from the
bytes and an H100's copy bandwidth of 3.0 TB/s, and not measured. Narrow kernels, as these products need, reach less
than the copy bandwidth. A step with TRL's defaults has three forward passes: for the old log-probs, for the loss, and
for recomputation. PEFT's training half of such a step takes 2.88 s without dropout.

| | PEFT | here |
|---|---|---|
| forward pass | 609 GB, 0.20 s | 147 GB, 0.05 s |
| backward pass | 670 GB, 0.22 s | 231 GB, 0.08 s |
| forward pass, dropout | 0.27 s | 0.08 s |
| backward pass, dropout | 0.29 s | 0.15 s |
| step with three forward passes | 0.83 s | 0.22 s |
| step with three forward passes, dropout | 1.08 s | 0.40 s |
| step with one forward pass | 0.43 s | 0.13 s |
| step with one forward pass, dropout | 0.55 s | 0.23 s |

Without checkpointing, 0.34 MB less are saved for each token. For a micro-batch of 8 rows that is 1.8 GB.

One product for `W` and `A` together would save 2 in of the forward pass (0.014 s). It would need both in one storage,
which neither FSDP's shards nor weights shared with an engine allow.

**A base in float32**, which TRL loads unless `dtype` says otherwise, is cast to bf16 in each forward pass. The cast
moves 6 bytes for each parameter of the base. PEFT casts in each forward pass, too, because autocast keeps casts of
trained parameters only. The cast copy is kept for the backward pass, and takes 2 bytes for each parameter; with
checkpointing, copies of only one decoder layer are kept at a time.

**Random numbers** on a CPU are the ones that PEFT draws, in the same order. On a GPU, the random number of an element
may depend on the width of the dtype. PEFT applies dropout to a copy of `x` in the adapter's dtype, float32. So if `x`
comes in bf16, the same seed may drop other elements than with PEFT.

**Layers that keep PEFT's forward** are quantised layers and other layers than `Linear`, variants (such as DoRA), layers
with a trained base or bias, with `lora_bias`, or with hooks. `apply` names each. Conditions that can change from call
to call are checked in each call: merged, disabled or several active adapters, `adapter_names`, sharded parameters, and
inputs that PEFT computes in two dtypes (a bf16 model with float32 adapters without autocast).

Importing this module imports PEFT.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from .autocasting import autocast_now
from .comparison import difference

CAST = {torch.bfloat16, torch.float16, torch.float32}  # by autocast
DTYPES = CAST | {torch.float64}
PLAIN = {nn.Parameter, Tensor}


logger = logging.getLogger(__name__)

COMPARED = 64
"""The number of tokens with which a layer is compared with PEFT's."""

_unproven: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Names of the layers whose next call is compared with PEFT's."""

_refuted: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The layers that got PEFT's forward back after a comparison, with a text on the difference that it found."""


def apply(model: nn.Module, compare: bool = False) -> list[tuple[str, str]]:
    """Give each of PEFT's LoRA layers in `model` the faster forward of this module, if this module can compute the
    layer.

    May be called again, for instance after an adapter was added.

    Args:
        model: any module, before or after it is wrapped; without PEFT's layers nothing happens.
        compare: whether the first call of each layer is compared with PEFT's forward and backward pass. A layer that
            differs by more than rounding explains gets PEFT's forward back, and a warning names it.

    Returns:
        Name and reason of each adapted module that keeps PEFT's forward, in model order.
    """
    unserved = []
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        found = _refuted.get(module) or _unserved_type(module) or _parts(module)
        if isinstance(found, str):
            unserved.append((name, found))
        else:
            if compare and "forward" not in vars(module):
                _unproven[module] = name
            module.forward = MethodType(forward, module)
    return unserved


def served(model: nn.Module, compare: bool = False) -> str:
    """Apply the faster forward to a model, and return a line that is printed when the run starts: how many of the LoRA
    layers have it.

    The line also names the first layer that keeps PEFT's forward, with the reason.

    Args:
        compare: as in `apply`.
    """
    unserved, adapted = apply(model, compare), sum(isinstance(module, BaseTunerLayer) for module in model.modules())
    said = f"LoRA layers: {adapted - len(unserved)} of {adapted} compute in fewer passes"
    return f"{said}; {unserved[0][0]} as in PEFT: {unserved[0][1]}" if unserved else said


def refuted(model: nn.Module) -> dict[str, str]:
    """Return the layers of a model that got PEFT's forward back after a comparison, by name, with the reason."""
    return {name: _refuted[module] for name, module in model.named_modules() if module in _refuted}


def proven(model: nn.Module) -> list[str]:
    """Return the names of a model's layers whose faster forward was compared with PEFT's, and is kept."""
    compared = (
        name
        for name, module in model.named_modules()
        if getattr(vars(module).get("forward"), "__func__", None) is forward and module not in _unproven
    )
    return list(compared)


def trust(model: nn.Module, names: Iterable[str]) -> None:
    """Compare layers of a model no more, as `proven` has returned them in the run that this one resumes."""
    known = set(names)
    for name, module in model.named_modules():
        if name in known:
            _unproven.pop(module, None)


def refute(model: nn.Module, found: Mapping[str, str]) -> None:
    """Give layers of a model PEFT's forward back, as `refuted` has returned them in the run that this one resumes."""
    for name, module in model.named_modules():
        if name in found:
            _refute(module, found[name])


def _refute(layer: nn.Module, reason: str) -> None:
    _unproven.pop(layer, None)
    _refuted[layer] = reason
    layer.forward = MethodType(Linear.forward, layer)


def forward(self: Linear, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Compute a LoRA layer's output, in place of `peft.tuners.lora.Linear.forward`.

    It calls PEFT's method for what this module does not compute, such as a merged or disabled adapter.

    The function must be named "forward". A pickle stores a bound method as an object and the method's name, and looks
    the name up in the object when it is loaded. So a pickled layer gets PEFT's forward when it is loaded.

    Args:
        x: (..., in), on one device with the parameters.

    Returns:
        (..., out), in autocast's dtype where it is on, else in the dtype of `x`.
    """
    plain = not (args or kwargs or self.disable_adapters or self.merged)
    parts = _parts(self) if plain else ""
    if not isinstance(parts, str):
        weight, bias, a, b, scaling, drop = parts
        dtype = _dtype(x, weight, a, b)
        if dtype is not None and (self not in _unproven or not x.numel() or _as_in_peft(self, x, dtype)):
            compute: Callable[..., Tensor] = _LowRank.apply
            return compute(x, weight, bias, a, b, scaling, drop, dtype)
    out: Tensor = Linear.forward(self, x, *args, **kwargs)
    return out


def _as_in_peft(layer: Linear, x: Tensor, dtype: torch.dtype) -> bool:
    """Compare a layer's outputs and gradients with those of PEFT's forward, and return whether rounding explains the
    differences. If it does not, give the layer PEFT's forward back, and log a warning that names it.

    Dropout is left out of the comparison. B, which begins as zeros, is replaced by other numbers meanwhile.

    Args:
        x: (..., in), the input of the layer's first call, of which up to `COMPARED` tokens are used.
        dtype: the dtype of the products.
    """
    name = _unproven.pop(layer)
    (adapter,) = (adapter for adapter in layer.active_adapters if adapter in layer.lora_A)
    held, dropout = layer.lora_B[adapter]._parameters, layer.lora_dropout[adapter]
    b, training = held["weight"], dropout.training
    assert b is not None
    noise = torch.randn(b.shape, generator=torch.Generator().manual_seed(0)).to(b)
    # Tensors are saved as they are: gradient checkpointing would take them for the layer's own, and recompute it.
    plain = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), plain:
        held["weight"], dropout.training = nn.Parameter(b.detach().clone() + noise, b.requires_grad), False
        try:
            ours, peft = (_results(layer, compute, x) for compute in (forward, Linear.forward))
        finally:
            held["weight"], dropout.training = b, training
    found = difference(ours, peft, dtype)
    if found is None:
        return True
    _refute(layer, f"it would differ from it by {found:.3g} of its largest value")
    logger.warning("LoRA layer %s computes as in PEFT: %s.", name, _refuted[layer])
    return False


def _results(layer: Linear, compute: Callable[[Linear, Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Return a layer's output, and the gradients of its input, A and B (unless frozen), for the first tokens of `x`."""
    given = x.detach().reshape(-1, x.shape[-1])[:COMPARED].clone().requires_grad_()
    (adapter,) = (adapter for adapter in layer.active_adapters if adapter in layer.lora_A)
    out = compute(layer, given)
    wanted = given, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    gradients = torch.autograd.grad(out, [t for t in wanted if t.requires_grad], out.detach())
    return [out.detach(), *gradients]


class _LowRank(torch.autograd.Function):
    """The function y = x Wᵀ + bias + s · (drop(x) Aᵀ) Bᵀ, computed in one dtype; W and bias are constants."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        drop: float,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.scaling, ctx.drop, ctx.dtypes = scaling, drop, (x.dtype, a.dtype, b.dtype)
        ctx.shared = x.dtype == dtype
        rows = x.reshape(-1, x.shape[-1])
        inputs, weight, a, b = _cast(rows, dtype), _cast(weight, dtype), _cast(a, dtype), _cast(b, dtype)
        out = F.linear(inputs, weight, None if bias is None else _cast(bias, dtype))
        dropped, mask = torch.native_dropout(rows, drop, True) if drop else (inputs, None)
        dropped = _cast(dropped, dtype)
        hidden = F.linear(dropped, a)
        out.addmm_(hidden, b.t(), alpha=scaling)
        # Other layers save the same x. A copy of it in `dtype` is this layer's own, and may as well be the dropped one.
        ctx.save_for_backward(x if ctx.shared else dropped, mask, weight, a, b, hidden)
        # Not as a view, which the model could not change in place.
        shaped: Tensor = torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The wrapper takes 2 µs, and is of use only while the backward pass itself is recorded (create_graph).
        gradients = once_differentiable(_gradients) if torch.is_grad_enabled() else _gradients
        return gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, mask, weight, a, b, hidden = ctx.saved_tensors
    of_x, of_a, of_b = ctx.dtypes
    shape = *grad.shape[:-1], x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    grad = _cast(grad.reshape(-1, grad.shape[-1]), x.dtype)
    low = grad.mm(b)
    grad_x = grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        if mask is None:
            grad_x = grad.mm(weight).addmm_(low, a, alpha=ctx.scaling)
        else:
            through = _product(low, a, ctx.scaling / (1 - ctx.drop))
            grad_x = torch.ops.aten.native_dropout_backward(through, mask, 1.0).addmm_(grad, weight)
        grad_x = _cast(grad_x.view(shape), of_x)
    if ctx.needs_input_grad[3]:
        if mask is not None and ctx.shared:
            x = torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - ctx.drop))
        grad_a = _over_tokens(low, x, ctx.scaling, of_a)
    if ctx.needs_input_grad[4]:
        grad_b = _over_tokens(grad, hidden, ctx.scaling, of_b)
    return grad_x, None, None, grad_a, grad_b, None, None, None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # a call of `to` that does nothing takes time, too


def _product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Return the matrix product left · right times scaling, rounded once to their dtype."""
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scaling)


def _over_tokens(left: Tensor, right: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return scaling · leftᵀ · right in `dtype`: the gradient of a weight, summed over tokens.

    Args:
        left, right: (tokens, features).
        scaling: a factor.
        dtype: dtype of the result.
    """
    if left.is_cuda and dtype == torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left.t(), right, out_dtype=dtype).mul_(scaling)
    return _cast(_product(left.t(), right, scaling), dtype)


def _dtype(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> torch.dtype | None:
    """Return the dtype in which PEFT would compute all products of the layer.

    None where PEFT's products would have different dtypes, or where a parameter is not a plain tensor (a shard, for
    instance).

    Args:
        x: the layer's input.
        weight, a, b: the frozen weight W and the adapter's A and B.
    """
    if not {type(weight), type(a), type(b)} <= PLAIN:  # a DTensor, for instance
        return None
    kind, dtypes = x.device.type, {x.dtype, weight.dtype, a.dtype, b.dtype}
    enabled, dtype = autocast_now(kind)
    if enabled:
        return dtype if dtypes <= CAST else None
    return x.dtype if len(dtypes) == 1 else None


def _unserved_type(layer: BaseTunerLayer) -> str | None:
    if type(layer) is not Linear:  # subclasses and its like compute something else: quantised or sharded layers
        return f"it is PEFT's {type(layer).__name__}; plain LoRA of a linear layer is served"
    replaced = vars(layer).get("forward", layer.forward)  # after unpickling it holds PEFT's, in place of ours
    if getattr(replaced, "__func__", None) not in (forward, Linear.forward):
        return "its forward was replaced"
    return None


def _parts(layer: BaseTunerLayer) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float, float] | str:
    """Return the tensors and numbers from which `_LowRank` computes a LoRA layer: W, bias, A, B and scaling of the only
    active adapter, and the dropout probability, which is 0 outside of training.

    If the layer, in its present state, computes something else, the reason is returned as a text. The function is
    called in each forward pass, and takes only a few µs.

    Args:
        layer: PEFT's layer.
    """
    modules = layer._modules
    adapters = modules["lora_A"]._modules
    names = [name for name in layer.active_adapters if name in adapters]
    if len(names) != 1:
        return f"{len(names)} of its adapters are active ({', '.join(names)}); one is served"
    (name,) = names
    if name in layer.lora_variant:
        return f"it computes a variant of LoRA ({type(layer.lora_variant[name]).__name__})"
    base, a, b = modules["base_layer"], adapters[name], modules["lora_B"]._modules[name]
    for module in (base, a, b):
        if type(module) is not nn.Linear:
            return f"it computes with a {type(module).__name__}"
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if hooks or module._backward_pre_hooks or "forward" in module.__dict__:
            return "hooks are to be called with its base, A or B, or a wrapper shards them one by one"
    (weight, bias), (of_a, _), (of_b, added) = _held(base), _held(a), _held(b)
    if added is not None:
        return "B has a bias (lora_bias)"
    if weight.dtype not in DTYPES:
        return f"its base is quantised ({weight.dtype})"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its base is trained as well"
    drop, dropout = 0.0, modules["lora_dropout"]._modules[name]
    if type(dropout) is not nn.Identity:
        if type(dropout) is not nn.Dropout or dropout.p == 1:
            return f"its input is dropped otherwise than by nn.Dropout, or all of it ({dropout})"
        drop = dropout.p if dropout.training else 0.0
    return weight, bias, of_a, of_b, layer.scaling[name], drop


def _held(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a linear layer; the bias is None if the layer has none.

    They are looked up in the module's dicts, which is faster than by attribute. Only where a wrapper (FSDP1) has set
    tensors in their place are they looked up by attribute.
    """
    held, own = linear._parameters, linear.__dict__
    weight = held.get("weight")
    if weight is not None and "bias" in held and "weight" not in own and "bias" not in own:
        return weight, held["bias"]
    return linear.weight, linear.bias
