"""CUDA graphs of what follows the layers in a decode step (head, sampling, log-probs), one for each batch size.

vLLM 0.31 replays a model's layers as a graph, and then launches some twelve kernels from Python: the head, noise, the
choice of a token, its log-prob, and the updates of the state that the next step reads. Where a host is slow, these
launches take 1.1 ms of a step of 2.8 ms, for which the GPU needs 2.4 ms (Qwen2's shape of 1.5B, 64 rows, one H100), and
the GPU waits. Here these kernels are captured when the engine is built, for the batch sizes for which vLLM has captured
the layers. Smaller batches are padded; padded rows change nothing.

A row is a sequence of the batch. The graphs are replayed in steps in which every row decodes one token, the layers ran
as a graph, the temperature is 1 or 0, and nothing is asked for but the sampled tokens and at most their log-probs. In
any other step vLLM's own code runs.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trlx_hybrid.errors import EngineError

from . import Patch, may_replace
from .multi_step import MultiStep
from .token_logprobs import EXACT, equal_to_vllm, token_logprobs

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

PATCHES = (
    Patch(
        of=(
            "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample",
            "vllm.v1.worker.gpu.model_runner.GPUModelRunner.postprocess_sampled",
            "vllm.v1.worker.gpu.sample.sampler.Sampler.add_request",
            "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_staged_writes",
        ),
        when="as long as the engine lives, on GPUs whose layers run as graphs",
        why="What follows the layers is launched from Python kernel by kernel, and on slow hosts the GPU waits for it.",
        until="vLLM's CUDA graphs include sampling",
    ),
)

PADDED = -1
"""The index of a padded row, in place of a request's index: vLLM's kernels skip such a row."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that runs the function it is given, captures its kernels in a CUDA graph, and returns the replay."""


def sampling_graphs(llm: LLM) -> SamplingGraphs | None:
    """Capture CUDA graphs of what an engine does after its layers in a decode step (head, sampling, log-probs).

    The graphs are installed in the engine, which must have been built just now.

    Returns:
        The graphs. None on a CPU, without graphs of the layers, and where the engine does more between the layers and
        the next step than the graphs capture. None, and a warning is logged, where the capture fails or the graphs
        compute other values than vLLM.
    """
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    if runner.device.type != "cuda" or not serves(llm) or not equal_to_vllm(runner.device):
        return None
    sizes = {min(layers.num_tokens, runner.max_num_reqs) for layers in runner.cudagraph_manager.graphs}
    return compared(SamplingGraphs(runner, sorted(sizes)), capturing(runner.device))


def compared(graphs: SamplingGraphs, capture: Capture) -> SamplingGraphs | None:
    """Capture the graphs, compare their results with vLLM's, and install and return the graphs if these are equal.

    If the results differ or the capture fails, the engine is left as it was, and None is returned.

    Args:
        graphs: new graphs, for which nothing is captured yet.
        capture: captures what a function launches in a CUDA graph.
    """

    def difference() -> float:
        with torch.inference_mode():
            graphs.capture(capture)
            return graphs.largest_difference()

    if not may_replace("Sampled tokens are", difference, EXACT):
        graphs.close()
        return None
    graphs.install()
    return graphs


def serves(llm: LLM) -> bool:
    """Return whether an engine may replay `SamplingGraphs`, CUDA graphs of what follows the layers in a decode step.

    True if the engine does nothing between its layers and the next step that these graphs do not capture.
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.interface import ModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    config, runner = llm.llm_engine.vllm_config, llm.llm_engine.model_executor.driver_worker.model_runner
    if not isinstance(runner, GPUModelRunner) or type(runner.sampler) is not Sampler:
        return False
    sampler, layers = runner.sampler, runner.cudagraph_manager
    parts = (runner.speculator, runner.rejection_sampler, runner.batch_sharder, runner.pcp_manager, runner.pp_handler)
    return (
        config.parallel_config.world_size == 1
        and not config.model_config.is_multimodal_model  # its requests bias the tokens that stand for images
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
    """CUDA graphs that replace a model runner's `sample` and `postprocess_sampled` in decode steps, from `install` on.

    Args:
        runner: the model runner (vLLM's second) of an engine for which `serves` is true, and whose layers are captured.
        sizes: the batch sizes to capture a graph for, ascending, none above the engine's largest batch.

    Attributes:
        active: whether the graphs are replayed. Must be False while other code than this package's reads the engine's
            outputs: these have token ids in the place of the sampled tokens' ranks by probability.
        replayed: how often a graph was replayed.
        multi_step: lets the runner decode several tokens of each request in one step.
    """

    def __init__(self, runner: GPUModelRunner, sizes: Sequence[int]) -> None:
        self.active = False
        self.replayed = 0
        self.multi_step = MultiStep(runner)
        self._runner, self._sampler = runner, runner.sampler
        self._sizes = list(sizes)
        self._replay: dict[int, Callable[[], None]] = {}
        self._hidden: Tensor = runner.cudagraph_manager.hidden_states  # (tokens, hidden), where the layers leave them
        zeros = functools.partial(torch.zeros, runner.max_num_reqs, device=runner.device)
        self._rows = zeros(dtype=torch.int64).fill_(PADDED)  # each row's index among vLLM's requests
        self._seeds = zeros(dtype=torch.int64)  # by such an index
        self._temperature = zeros(dtype=torch.float32)  # by such an index
        self._tokens = zeros(dtype=torch.int64)
        self._logprobs = zeros(dtype=torch.float32)
        self._zeros = zeros(dtype=torch.int32)
        self._ones = self._zeros + 1
        self._replaying = False  # the step that is under way
        self._staged = True  # requests were added since vLLM last copied their parameters
        self._last_rows = b""  # the rows of the last step
        self._served = False  # whether the rows ask only for what the graphs compute
        self._scored = False  # whether the rows ask for log-probs
        self._stock = runner.sample, runner.postprocess_sampled
        self._stock_sampler = runner.sampler.add_request, runner.sampler.apply_staged_writes

    def capture(self, capture: Capture) -> None:
        """Capture a graph for each batch size, the largest first, so that the others reuse its memory.

        Args:
            capture: captures what a function launches in a CUDA graph.
        """
        self._replay = {size: capture(functools.partial(self._step, size)) for size in reversed(self._sizes)}

    def install(self) -> None:
        """Replace vLLM's methods of the runner and the sampler by those of this class, which replay the graphs."""
        self._runner.sample, self._runner.postprocess_sampled = self._sample, self._postprocess_sampled
        self._sampler.add_request, self._sampler.apply_staged_writes = self._add_request, self._apply_staged_writes
        self.multi_step.install()

    def close(self) -> None:
        """Free the graphs, and leave the runner as it was."""
        self.active = False
        self._replay.clear()
        self.multi_step.close()
        for owner, names in (
            (self._runner, ("sample", "postprocess_sampled")),
            (self._sampler, ("add_request", "apply_staged_writes")),
        ):
            for name in names:
                vars(owner).pop(name, None)

    def _step(self, size: int) -> None:
        """Launch the kernels that a graph for a batch of `size` rows consists of.

        They compute, from the layers' output, the sampled tokens and their log-probs, and update the state of the
        requests that the next step reads.
        """
        from vllm.v1.worker.gpu.input_batch import post_update
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        states, buffers, rows = self._runner.req_states, self._runner.input_buffers, self._rows[:size]
        logits = self._runner.model.compute_logits(self._hidden[:size])
        sampled = gumbel_sample(
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
        torch.clamp(sampled, max=logits.shape[1] - 1, out=tokens)  # a padded row's logits may be NaN
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

    def largest_difference(self) -> float:
        """Return the largest difference between the graphs' results and vLLM's, in nats.

        May be called only before the engine has served a request.

        For each row, the difference is a sum of two: the difference of the sampled token's log-probs, and how far the
        token's logit is below the largest logit. The rows have random hidden states and are marked as padding, so they
        are sampled at temperature 0.
        """
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        generator, largest = torch.Generator(self._hidden.device).manual_seed(0), 0.0
        for size in self._sizes:
            self._hidden[:size].normal_(std=100, generator=generator)  # vLLM's random weights are small
            logits = self._runner.model.compute_logits(self._hidden[:size])
            self._replay[size]()
            theirs = compute_token_logprobs(logits, tokens := self._tokens[:size, None])[:, 0]
            less = logits.amax(dim=1) - logits.gather(1, tokens)[:, 0]
            largest = max(largest, float(((theirs - self._logprobs[:size]).abs() + less).max()))
        return largest

    # --- in the place of vLLM's methods -----------------------------------------------------------------------------

    def _sample(self, hidden: Tensor, batch: InputBatch, grammar: GrammarOutput | None) -> Any:
        self._replaying = self.active and grammar is None and self._decodes(hidden, batch) and self._serves_rows(batch)
        if self._replaying:
            return self._sampled(batch, self.multi_step.tokens)
        if self.multi_step.tokens > 1:
            raise EngineError(
                f"A step of {self.multi_step.tokens} tokens was scheduled for {batch.num_reqs} requests, but vLLM "
                "would sample one of each. This is a fault of trlx-hybrid-vllm. engine_options={'enforce_eager': True} "
                "in HybridConfig decodes one token a step."
            )
        return self._stock[0](hidden, batch, grammar)

    def _postprocess_sampled(self, *args: Any, **kwargs: Any) -> None:
        if not self._replaying:  # otherwise the graph has done it
            self._stock[1](*args, **kwargs)

    def _add_request(self, *args: Any, **kwargs: Any) -> None:
        self._staged, self._last_rows = True, b""
        self._stock_sampler[0](*args, **kwargs)

    def _apply_staged_writes(self) -> None:
        if self._staged:  # vLLM copies the parameters of all requests in each step, new ones or not
            self._stock_sampler[1]()
        self._staged = False

    def _decodes(self, hidden: Tensor, batch: InputBatch) -> bool:
        """Return whether in this step every row decodes one token, and the layers ran as a CUDA graph."""
        return (
            hidden.data_ptr() == self._hidden.data_ptr()
            and not batch.has_prefill
            and batch.num_tokens == batch.num_reqs <= self._sizes[-1]
            and not batch.num_draft_tokens
        )

    def _serves_rows(self, batch: InputBatch) -> bool:
        """Return whether the requests of a batch ask only for sampled tokens and at most their log-probs.

        If the batch's requests have changed, their seeds and temperatures are copied to where the graphs read them.
        """
        rows = batch.idx_mapping_np.tobytes()
        if self._last_rows != rows:
            asked = self._sampler.get_logprobs_dims(batch.idx_mapping_np)
            processed = self._sampler.needs_logits_processing[batch.idx_mapping_np].any()
            self._served, self._scored = asked in (None, (0, 0)) and not processed, asked is not None
            self._rows.fill_(PADDED)
            self._rows[: batch.num_reqs].copy_(batch.idx_mapping)
            self._seeds.copy_(self._sampler.sampling_states.seeds.gpu)
            self._temperature.copy_(self._sampler.sampling_states.temperature.gpu)
            self._last_rows = rows
        return self._served

    def _sampled(self, batch: InputBatch, steps: int) -> Any:
        """Sample `steps` tokens of each request of a batch whose layers have run for the first of them."""
        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        count = batch.num_reqs
        replay = self._replay[self._sizes[bisect.bisect_left(self._sizes, count)]]
        tokens, logprobs = self._tokens.new_empty(count, steps), self._logprobs.new_empty(count, steps)
        for step in range(steps):
            if step:
                self.multi_step.advance(batch, step)
            replay()
            tokens[:, step] = self._tokens[:count]  # the next replay writes there
            if self._scored:
                logprobs[:, step] = self._logprobs[:count]
        self.replayed += steps
        self.multi_step.stepped(batch.req_ids)
        scores, flat = None, tokens.flatten()
        if self._scored:
            edges = list(range(0, flat.numel() + 1, steps)) if steps > 1 else None
            ranks = flat  # see `active`
            scores = LogprobsTensors(flat[:, None], logprobs.flatten()[:, None], ranks, edges)
        output = SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=scores,
            num_nans=None,
            num_sampled=self._ones[:count] * steps if steps > 1 else self._ones[:count],
            num_rejected=self._zeros[:count],
        )
        return output, output.num_sampled, output.num_rejected


def capturing(device: torch.device) -> Capture:
    """Return a function that captures CUDA graphs on this device. Its argument is a function: the kernels that this
    function launches are captured. Its result is a function that replays the graph.

    The graphs share one memory pool, since they never run at the same time. Each function is run once before the
    capture, on the stream of the capture, whose cuBLAS workspace the graphs keep.
    """
    new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
    stream, pool = new_stream(device), torch.cuda.graph_pool_handle()

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # left even where a capture fails
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph.replay

    return capture
