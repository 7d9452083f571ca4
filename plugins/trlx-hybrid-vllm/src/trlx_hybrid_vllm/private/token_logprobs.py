"""Triton kernels for the log-probs of sampled tokens, faster than vLLM's, and without the tokens' ranks by probability.

vLLM 0.31 gives each row of logits to one program, which reads the vocabulary three times. In a decode step of 40 rows
with a vocabulary of 152,000, the log-probs take 118 µs and the ranks, which nobody reads, 21 µs; the rest of the step
takes the GPU 2.3 ms (a CUDA profile on an H200). Here each program reads one block of a row once, and a second kernel
sums up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from . import Patch, may_replace, replaced

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

PATCHES = (
    Patch(
        of=("vllm.v1.worker.gpu.sample.sampler.compute_topk_scores",),
        when="while a rollout decodes on a GPU",
        why="The log-probs and ranks of sampled tokens take 139 µs of a decode step of 2.3 ms; nobody reads the ranks.",
        until="vLLM's kernel splits a row, and can leave the ranks out",
    ),
)

BLOCK = 4096
"""The number of logits that one program of the kernel reads."""

EXACT = 1e-5
"""The largest difference from vLLM's own log-probs that is allowed, in nats; the kernels sum in another order."""


kernel: Callable[[Callable[..., None]], Any] = triton.jit


@kernel
def _blocks(maxima, sums, logits, stride, vocabulary, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + places, mask=places < vocabulary, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # the block is masked completely
    tl.store(maxima + row * blocks + block, largest)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(values - shift), axis=0))


@kernel
def _rows(out, maxima, sums, logits, stride, tokens, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    of_row = row * blocks + places
    maximum = tl.load(maxima + of_row, mask=places < blocks, other=float("-inf"))
    largest = tl.max(maximum, axis=0)
    total = tl.sum(tl.load(sums + of_row, mask=places < blocks, other=0.0) * tl.exp(maximum - largest), axis=0)
    value = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(out + row, value - largest - tl.log(total))


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute the natural logarithm of the probability of one token per row.

    Args:
        logits: (rows, vocabulary) of any float dtype, computed in float32; rows may be strided.
        tokens: (rows,) integers.

    Returns:
        (rows,) float32.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    maxima, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _blocks[rows, blocks](maxima, sums, logits, logits.stride(0), vocabulary, blocks, BLOCK=BLOCK)
    padded = triton.next_power_of_2(blocks)
    _rows[(rows,)](out, maxima, sums, logits, logits.stride(0), tokens, blocks, BLOCKS=padded)
    return out


@contextmanager
def without_ranks(scheduler: Scheduler, device: torch.device) -> Iterator[None]:
    """Return a context in which vLLM's sampler computes the log-probs of sampled tokens with this module's kernels.

    The tokens' ranks by probability are not computed: the output has the tokens' ids in their place. Where more than
    the sampled tokens' log-probs is asked for, vLLM's own kernels run. Nothing changes on a CPU, with vLLM's older
    model runner, or where a first comparison shows that the kernels' values differ from vLLM's.

    Args:
        scheduler: the scheduler of the engine that runs inside the context.
        device: the engine's device.
    """
    if device.type != "cuda" or not getattr(scheduler, "use_v2_model_runner", False) or not equal_to_vllm(device):
        yield
        return
    from vllm.v1.worker.gpu.sample import sampler

    with replaced(sampler, "compute_topk_scores", scores_like(sampler.compute_topk_scores)):
        yield


def scores_like(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for vLLM's `compute_topk_scores` that uses this module's kernels.

    Args:
        stock: vLLM's own function, called where more is asked for than the log-probs of the sampled tokens.
    """
    from vllm.v1.outputs import LogprobsTensors

    @functools.wraps(stock)
    def scores(logits: Tensor, num_logprobs: int, sampled: Tensor, edges: Any = None, **kwargs: Any) -> Any:
        more = num_logprobs or edges is not None or kwargs.get("max_per_req_token_ids") or kwargs.get("logits_mode")
        if more:
            return stock(logits, num_logprobs, sampled, edges, **kwargs)
        values = token_logprobs(logits, sampled)
        return LogprobsTensors(sampled.unsqueeze(-1), values.unsqueeze(-1), selected_token_ranks=sampled)

    return scores


@functools.cache
def equal_to_vllm(device: torch.device) -> bool:
    """Return whether this module's kernels compute the same log-probs as vLLM's on this device, for random logits.

    The first call compiles them.
    """
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(5, 3 * BLOCK + 17, generator=generator, device=device) * 8
    tokens = torch.arange(5, device=device) * 2_000

    def apart() -> float:
        theirs = compute_token_logprobs(logits, tokens[:, None])[:, 0]
        return float((token_logprobs(logits, tokens) - theirs).abs().max())

    return may_replace("Log-probs (in nats) are", apart, EXACT)
