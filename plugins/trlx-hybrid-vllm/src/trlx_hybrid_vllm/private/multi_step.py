"""Several decode steps in one step of vLLM's engine.

The host needs 1 ms or more for a step: it plans it, prepares its inputs, copies its tokens back and books them. The GPU
needs half of that for a step of a model with 135M parameters. Here, all this is done once for several steps. Between
two of them, only kernels are launched: those that prepare the next inputs, the graph of the layers, and the graph of
what follows these (`sampling_graphs.py`). Kernels and shapes are those of single steps, and so are tokens and
log-probs, bit for bit, as long as no request stops.

A request that stops stays in the batch until the last of the steps that are decoded at once, and in those that are
scheduled already. Its tokens there are dropped. The others may be rounded otherwise then, as with any other number of
rows. The larger a model is, the more this costs, so the fewer steps are decoded at once. Their number depends on the
model alone, and not on measured times: the same requests are always decoded in the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import Patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

PATCHES = (
    Patch(
        of=(
            "vllm.v1.worker.gpu.model_runner.GPUModelRunner.execute_model",
            "vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.run_fullgraph",
        ),
        when="as long as the engine lives, on GPUs whose layers run as graphs",
        why="The host needs 1 ms or more for a decode step, and the GPU half of that where the model is small.",
        until="vLLM decodes several tokens of a request in one step without drafts",
    ),
)

READ = 6_000_000_000
"""The most bytes of weights that are read by the steps that are decoded at once, where these are more than one.

To read them takes an H100 or H200 about as long as the host needs for a step.
"""

MOST = 8
"""The most steps that are decoded at once."""


def serves(runner: GPUModelRunner) -> bool:
    """Return whether `MultiStep.advance` launches all that vLLM launches between two decode steps of this runner.

    vLLM launches more for positions in several dimensions, states beside the KV cache, contexts split over ranks, and
    experts that move between ranks.
    """
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    state = runner.model_state
    own = ("preprocess_state", "prepare_inputs", "prepare_attn")
    return (
        all(getattr(type(state), name) is getattr(DefaultModelState, name) for name in own)
        and state.rope_state is None
        and runner.fast_prefill is None
        and runner.dcp_size == 1
        and not runner.parallel_config.enable_eplb
    )


class MultiStep:
    """Lets a model runner decode several tokens of each request in one step of the engine.

    Args:
        runner: the model runner (vLLM's second) of an engine that has one kind of KV cache and runs on one rank, and
            whose layers are captured.

    Attributes:
        most: how many tokens of a request one step decodes at most.
        tokens: how many tokens of each request the step that is under way decodes.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        read = sum(weight.nbytes for weight in runner.model.parameters())
        self.most = max(1, min(MOST, READ // read)) if serves(runner) else 1
        self.tokens = 1
        self._runner = runner
        self._layers: BatchExecutionDescriptor | None = None  # the graph of the layers that ran last
        self._served: Sequence[str] = ()  # the requests of the last step, where it was one that graphs decode
        self._stock = runner.execute_model, runner.cudagraph_manager.run_fullgraph

    def install(self) -> None:
        """Replace vLLM's methods of the runner and its graphs by those of this class."""
        self._runner.execute_model, self._runner.cudagraph_manager.run_fullgraph = self._execute_model, self._run_layers

    def close(self) -> None:
        """Leave the runner as it was."""
        vars(self._runner).pop("execute_model", None)
        vars(self._runner.cudagraph_manager).pop("run_fullgraph", None)

    def at_once(self, ids: list[str]) -> int:
        """Return how many tokens of each of these requests may be decoded in the next step.

        More than one only where the last step decoded these requests, perhaps with others, and all that it did after
        the layers was one graph. The next step of these requests can then be no other.

        Args:
            ids: vLLM's ids of the requests.
        """
        return self.most if self.most > 1 and set(self._served).issuperset(ids) else 1

    def stepped(self, ids: Sequence[str]) -> None:
        """Note that a step has decoded these requests, with one graph after the layers."""
        self._served = ids

    def advance(self, batch: InputBatch, done: int) -> None:
        """Launch the layers for the next token of each request of a batch.

        Args:
            batch: the batch as vLLM prepared it for the first token.
            done: how many tokens of each request have been sampled since then, at least 1.
        """
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        runner, states, buffers = self._runner, self._runner.req_states, self._runner.input_buffers
        prepare_pos_seq_lens(
            batch.idx_mapping,
            batch.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        combine_sampled_and_draft_tokens(
            buffers.input_ids,
            batch.idx_mapping,
            states.last_sampled_tokens,
            batch.query_start_loc,
            batch.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            batch.cu_num_logits,
            batch.num_reqs,
        )
        tables = tuple(table[: batch.num_reqs_after_padding] for table in runner.block_tables.input_block_tables)
        slots = runner.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens_after_padding
        )
        longer = batch.seq_lens_cpu_upper_bound.clone()
        longer[: batch.num_reqs] += done  # the others are padding
        moved = replace(
            batch, seq_lens_cpu_upper_bound=longer, num_computed_tokens_np=batch.num_computed_tokens_np + done
        )
        runner.model_state.prepare_attn(
            moved, CUDAGraphMode.FULL, tables, slots, runner.attn_groups, runner.kv_cache_config
        )
        self._stock[1](self._layers)

    # --- in the place of vLLM's methods -----------------------------------------------------------------------------

    def _execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.tokens = getattr(scheduler_output, "tokens", 1)
        self._served = ()
        return self._stock[0](scheduler_output, *args, **kwargs)

    def _run_layers(self, graph: BatchExecutionDescriptor) -> Any:
        self._layers = graph
        return self._stock[1](graph)
