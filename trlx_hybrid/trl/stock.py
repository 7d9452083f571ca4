# ruff: noqa: D102
"""The attributes and methods of TRL's and transformers' trainers that this package reads, sets or extends, for the type
checker: it refuses any that is not listed here. tests/test_trl_internals.py checks that the trainers have them.

Sources: trl 1.16, `trl/trainer/grpo_trainer.py`, `rloo_trainer.py`, `distillation_trainer.py`; transformers 5.17,
`trainer.py`.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ..session import Session

Rows = list[dict[str, Any]]
"""Rows of a dataset, or micro-batches, by column."""


def mode_of(trainer: StockTrainer) -> str:
    """Return the key of TRL's metrics and logs for what runs now: "train", or "eval" in an evaluation."""
    return "train" if trainer.model.training else "eval"


class StockTrainer:
    """A trainer of TRL's, as this package knows it. The class exists for annotations only, and no object of it is ever
    made.

    Not every trainer of TRL's has all of these attributes. Code that reads an attribute which may be missing uses
    `getattr` with a default.

    Attributes:
        session: this package's live objects of the run, see `Session`; all other attributes are TRL's or transformers'.
    """

    session: Session

    # --- transformers.Trainer
    args: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    deepspeed: Any
    state: Any
    control: Any
    callback_handler: Any
    processing_class: Any
    train_dataset: Any
    data_collator: Any
    current_gradient_accumulation_steps: int
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    add_callback: Callable[[Any], None]
    _get_output_dir: Callable[..., str]

    # --- trl: the run
    _name: str
    _step: int
    _metrics: dict[str, defaultdict[str, list[float]]]
    _logs: dict[str, Any]
    _buffered_inputs: Rows | None
    _current_train_step_time: float
    _last_loaded_step: int
    _pending_extra_logs: defaultdict[str, list[Any]]
    _log_completion_extra: Callable[..., None]
    _log_metric: Callable[..., None]
    log_completions: bool
    log_multimodal: bool

    # --- trl: what is sampled
    vllm_mode: str
    vllm_generation: Any
    rollout_func: Any
    reward_funcs: list[Any]
    reward_weights: Tensor
    num_generations: int
    max_completion_length: int
    eos_token_ids: list[int]
    chat_template: Any
    chat_template_kwargs: dict[str, Any]
    _tokenizer: Any
    _is_vlm: bool

    # --- trl: tools and environments
    tools: list[Any] | None
    environments: list[Any]
    environment_factories: dict[str | None, Callable[[], Any]] | None
    max_tool_calling_iterations: int
    async_loop: AbstractEventLoop
    _standalone_tools: list[Callable[..., Any]]
    _sync_tool_dicts: list[dict[str, Callable[..., Any]]]
    _async_tool_dicts: list[dict[str, Callable[..., Any]]]
    _tool_dict: dict[str, Callable[..., Any]]
    _env_tools: dict[str | None, list[Any]]
    _environment_pool: dict[str | None, list[Any]]
    _batch_environments: list[str | None]
    _get_tool_suffix_ids: Callable[[Sequence[dict[str, Any]]], list[int]]

    # --- trl: what is trained
    beta: float
    temperature: float
    num_iterations: int
    ref_model: Any
    aux_loss_enabled: bool
    vllm_importance_sampling_mode: str
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_clip_min: float | None
    vllm_importance_sampling_clip_max: float | None

    # --- this package's
    _base_name: str
    """`_name` of TRL's trainer. A user's class may have a `_name` of its own, for model cards."""

    if TYPE_CHECKING:
        # The methods that HybridTrainer extends, in its order.
        use_vllm: bool

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any: ...
        def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any: ...
        def _init_training_state(
            self, max_steps: Any, steps_per_epoch: Any, epochs: Any, resume_from_checkpoint: Any, trial: Any
        ) -> tuple[int, int]: ...
        def _run_epoch(self, *args: Any, **kwargs: Any) -> None: ...
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any: ...
        def _prepare_inputs(self, generation_batch: Any) -> Any: ...
        def _generate_and_score_completions(self, inputs: Rows) -> dict[str, Any]: ...
        def _generate(self, prompts: list[Any]) -> Any: ...
        def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]: ...
        def _generate_single_turn(
            self, prompt_ids: Any, images: Any, multimodal_fields: Any, *rest: Any, **kwargs: Any
        ) -> Any: ...
        def _tool_call_loop(
            self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, *rest: Any
        ) -> Any: ...
        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor: ...
        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            batch_size: int | None = None,
            compute_entropy: bool = False,
            compute_aux_loss: bool = False,
            **images: Any,
        ) -> Any: ...
        def _compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any) -> Any: ...
        def _clip_grad_norm(self, model: Any) -> Any: ...
        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any: ...
        def log(self, *args: Any, **kwargs: Any) -> None: ...
        def _save_checkpoint(self, model: Any, trial: Any) -> None: ...
        def _save(self, *args: Any, **kwargs: Any) -> None: ...
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
        def _save_scaler(self, output_dir: str) -> None: ...
        def _save_rng_state(self, output_dir: str) -> None: ...
        def create_model_card(self, *args: Any, **kwargs: Any) -> None: ...
        def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None: ...
        def _load_best_model(self) -> None: ...
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None: ...
