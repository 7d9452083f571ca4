"""The half of a decode step that chooses tokens, as one CUDA graph for each number of rows.

vLLM 0.31 replays a model's layers as a graph, and launches some twelve kernels from Python behind it: the head, noise,
the choice, its log-prob, what the next step reads of it. Where a host is slow that takes 1.1 ms of a decode step of
2.8 ms, for which the GPU needs 2.4 ms (Qwen2's shape of 1.5B, 64 rows, one H100), and the GPU waits. Here they are
captured once, when the engine is built, for the numbers of rows for which the layers were; rows that are not there are
passed over.

A step is replayed where every row decodes one token behind a graph of the layers, at temperature 1 or 0, and nothing is
asked for but the sampled tokens' log-probs. Any other step is vLLM's own.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .internals import may_replace
from .token_logprobs import EXACT, equal_to_vllm, token_logprobs

NOBODY = -1
"""Index of a row that is not there, which vLLM's kernels pass over."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures a function that launches kernels, and returns what replays it."""


def sampling_graphs(llm: Any) -> SamplingGraphs | None:
    """The graphs of an engine that was just built; None on a CPU, without graphs of the layers, where the engine does
    more between the layers and the next step than is captured here, and where a first comparison shows other values."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    if runner.device.type != "cuda" or not serves(llm) or not equal_to_vllm(runner.device):
        return None
    sizes = {layers.num_tokens for layers in runner.cudagraph_manager.graphs}
    made: list[SamplingGraphs] = []

    def apart() -> float:
        with torch.inference_mode():
            made.append(SamplingGraphs(runner, sorted(sizes), capturing(runner.device, runner.cudagraph_manager.pool)))
            return made[0].apart()

    return made[0] if may_replace("Sampled tokens are", apart, EXACT) else None


def serves(llm: Any) -> bool:
    """Whether an engine has nothing between its layers and the next step that the graphs leave out."""
    from vllm.lora.layers import LogitsProcessorWithLoRA
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    if not isinstance(runner, GPUModelRunner) or type(runner.sampler) is not Sampler:
        return False
    sampler, layers = runner.sampler, runner.cudagraph_manager
    parts = (runner.speculator, runner.rejection_sampler, runner.batch_sharder, runner.pcp_manager, runner.pp_handler)
    return (
        llm.llm_engine.vllm_config.parallel_config.world_size == 1
        and layers is not None
        and bool(layers.graphs)
        and isinstance(layers.hidden_states, Tensor)
        and all(part is None for part in (*parts, sampler.trace_replay_state))
        and sampler.logprobs_mode in ("raw_logprobs", "processed_logprobs")
        and not sampler.compute_nans
        and not sampler.return_sampling_mask
        and len(sampler.logits_processors) == 3  # biases, penalties and forbidden words; none of the user's
        and type(runner.model_state).postprocess_state is ModelState.postprocess_state
        and not any(isinstance(module, LogitsProcessorWithLoRA) for module in runner.model.modules())
    )


class SamplingGraphs:
    """Takes the place of a model runner's `sample` and `postprocess_sampled`, inside `replaying`.

    Args:
        runner: vLLM's second model runner, its layers' graphs captured, of an engine that `serves`.
        sizes: numbers of rows, ascending.
        capture: called with the largest size first.

    Attributes:
        replayed: how many steps were.
    """

    def __init__(self, runner: Any, sizes: Sequence[int], capture: Capture) -> None:
        self._runner, self._sampler = runner, runner.sampler
        self._hidden: Tensor = runner.cudagraph_manager.hidden_states  # (tokens, hidden), where the layers leave them
        self._sizes = [size for size in sizes if size <= min(runner.max_num_reqs, len(self._hidden))]
        empty = functools.partial(torch.empty, runner.max_num_reqs, device=runner.device)
        self._rows = empty(dtype=torch.int32).fill_(NOBODY)  # each row's place among vLLM's requests
        self._seeds = empty(dtype=torch.int64).zero_()  # by place, as the next
        self._temperature = empty(dtype=torch.float32).zero_()
        self._tokens = empty(dtype=torch.int64).zero_()
        self._logprobs = empty(dtype=torch.float32).zero_()
        self._ones = empty(dtype=torch.int32).fill_(1)
        self._zeros = empty(dtype=torch.int32).zero_()
        self._seen: tuple[bytes, bool] | None = None  # the places of the last step's rows, and whether those are plain
        self._replay = {size: capture(functools.partial(self._step, size)) for size in reversed(self._sizes)}
        self.replayed = 0

    def _step(self, size: int) -> None:
        """What is captured: from the layers' output to the tokens, and to what the next step reads of them."""
        from vllm.v1.worker.gpu.input_batch import post_update
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        states, buffers, rows = self._runner.req_states, self._runner.input_buffers, self._rows[:size]
        logits = self._runner.model.compute_logits(self._hidden[:size])
        chosen = gumbel_sample(
            logits,
            rows,
            self._temperature,
            self._seeds,
            buffers.positions[:size],
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self._sampler.use_fp64_gumbel,
        )
        tokens = self._tokens[:size]
        torch.clamp(chosen, max=logits.shape[1] - 1, out=tokens)  # rows that are not there may hold no numbers
        self._logprobs[:size].copy_(token_logprobs(logits, tokens))
        post_update(
            rows,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            self._sampler.penalties_state.output_bin_counts,
            tokens[:, None],
            self._ones[:size],
            self._zeros[:size],
            buffers.query_start_loc[: size + 1],
            states.all_token_ids.gpu,
            states.total_len.gpu,
        )

    def apart(self) -> float:
        """The largest difference from vLLM's own, in nats, of random states for which both take a likeliest token.

        Only before any request was served."""
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        generator, largest = torch.Generator(self._hidden.device).manual_seed(0), 0.0
        for size in self._sizes:
            self._hidden[:size].normal_(std=100, generator=generator)  # vLLM's random weights are small
            logits = self._runner.model.compute_logits(self._hidden[:size])
            self._replay[size]()
            theirs = compute_token_logprobs(logits, tokens := self._tokens[:size, None])[:, 0]
            short = logits.amax(dim=1) - logits.gather(1, tokens)[:, 0]
            largest = max(largest, float(((theirs - self._logprobs[:size]).abs() + short).max()))
        return largest

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, steps are replayed that can be."""
        runner, sampler = self._runner, self._sampler
        sample, postprocess = runner.sample, runner.postprocess_sampled
        add, apply = sampler.add_request, sampler.apply_staged_writes
        replayed, staged = False, True

        def choose(hidden: Tensor, batch: Any, grammar: Any) -> Any:
            nonlocal replayed
            replayed = grammar is None and self._decodes(hidden, batch) and self._take_seats(batch)
            return self._chosen(batch.num_reqs) if replayed else sample(hidden, batch, grammar)

        def update(*args: Any, **kwargs: Any) -> None:
            if not replayed:
                postprocess(*args, **kwargs)

        def add_request(*args: Any, **kwargs: Any) -> None:
            nonlocal staged
            staged, self._seen = True, None
            add(*args, **kwargs)

        def apply_staged_writes() -> None:  # vLLM copies all its parameters with each step, new or not
            nonlocal staged
            if staged:
                apply()
            staged = False

        self._seen = None
        with ExitStack() as stack:
            for owner, name, own in (
                (runner, "sample", choose),
                (runner, "postprocess_sampled", update),
                (sampler, "add_request", add_request),
                (sampler, "apply_staged_writes", apply_staged_writes),
            ):
                stack.enter_context(patch.object(owner, name, own))
            yield

    def _decodes(self, hidden: Tensor, batch: Any) -> bool:
        """Whether every row decodes one token, behind a graph of the layers."""
        return (
            hidden.data_ptr() == self._hidden.data_ptr()
            and not batch.has_prefill
            and batch.num_tokens == batch.num_reqs <= self._sizes[-1]
            and not batch.num_draft_tokens
        )

    def _take_seats(self, batch: Any) -> bool:
        """Bring the rows' parameters where the graphs read them, if they changed; returns whether all are plain."""
        places = batch.idx_mapping_np.tobytes()
        if self._seen is None or self._seen[0] != places:
            asked = self._sampler.get_logprobs_dims(batch.idx_mapping_np)
            processed = self._sampler.needs_logits_processing[batch.idx_mapping_np].any()
            self._seen = places, asked == (0, 0) and not processed
            self._rows.fill_(NOBODY)
            self._rows[: batch.num_reqs].copy_(batch.idx_mapping)
            self._seeds.copy_(self._sampler.sampling_states.seeds.gpu)
            self._temperature.copy_(self._sampler.sampling_states.temperature.gpu)
        return self._seen[1]

    def _chosen(self, count: int) -> Any:
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        self._replay[self._sizes[bisect.bisect_left(self._sizes, count)]]()
        self.replayed += 1
        tokens, logprobs = self._tokens[:count].clone(), self._logprobs[:count].clone()  # the next step writes there
        ids = tokens[:, None]
        output = SamplerOutput(
            sampled_token_ids=ids,
            logprobs_tensors=LogprobsTensors(ids, logprobs[:, None], selected_token_ranks=tokens),
            num_nans=None,
            num_sampled=self._ones[:count],
            num_rejected=self._zeros[:count],
        )
        return output, output.num_sampled, output.num_rejected


def capturing(device: torch.device, pool: Any) -> Capture:
    """CUDA graphs in memory that graphs share which run one after the other.

    Args:
        pool: torch's handle of that memory.
    """

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()  # compiles, and lets cuBLAS take its memory
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return graph.replay

    return capture
