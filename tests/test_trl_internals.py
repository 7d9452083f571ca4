"""What trainer.py relies on in TRL 1.16. When an upgrade breaks one of these, this names it."""

import ast
import inspect
import textwrap
from collections import Counter

import pytest
import transformers
import trl
import trlx_hybrid
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trlx_hybrid.trl.borrowed import GENERATING, OWN_ENGINE
from trlx_hybrid.trl.checkpoint import manifest
from trlx_hybrid.trl.generation.vllm_generation import Generation
from trlx_hybrid.trl.scoring.kept_log_probs import _Head
from trlx_hybrid.trl.stock import StockTrainer
from trlx_hybrid.trl.trainer import HybridTrainer

METHODS = (
    "_clip_grad_norm",
    "_generate",
    "_generate_and_score_completions",
    "_get_grad_norm",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_push_from_checkpoint",
    "_run_epoch",
    "_save",
    "_save_checkpoint",
)


OURS = {"session", "_base_name"}
"""Attributes of a trainer that are this package's, not TRL's."""


def source(function):
    return textwrap.dedent(inspect.getsource(function))


@pytest.mark.parametrize("trainer", GENERATING, ids=lambda t: t.__name__)
def test_the_methods_that_are_extended_exist_with_their_arguments(trainer):
    for name in METHODS:
        assert callable(getattr(trainer, name))
    assert list(inspect.signature(trainer._generate).parameters) == ["self", "prompts"]
    assert list(inspect.signature(trainer._generate_and_score_completions).parameters) == ["self", "inputs"]


@pytest.mark.parametrize("trainer", GENERATING, ids=lambda t: t.__name__)
def test_generation_goes_through_use_vllm_and_two_methods(trainer):
    """Only `sync_weights`, `generate` and `llm` of the object that ours stands in for may be used."""
    used = set()
    for node in ast.walk(ast.parse(source(trainer))):
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(owner, ast.Attribute) and owner.attr == "vllm_generation":
            used.add(node.attr)
    used.discard("vllm_client")  # server mode's
    assert used <= {"sync_weights", "generate", "llm"}
    assert {"sync_weights", "generate"} <= used
    for name in used:
        assert hasattr(Generation, name)
    body = source(trainer._generate_single_turn)
    assert "if self.use_vllm:" in body
    assert "self.state.global_step != self._last_loaded_step" in body
    assert "self.use_vllm = args.use_vllm" in source(trainer.__init__)


@pytest.mark.parametrize("name", ["_generate_single_turn", "_tool_call_loop"])
def test_arguments_of_what_is_extended_have_trls_names(name):
    """Custom rollouts call it with keywords."""
    ours = inspect.signature(getattr(HybridTrainer, name)).parameters.values()
    named = [parameter.name for parameter in ours if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert len(named) > 3
    assert list(inspect.signature(getattr(trl.GRPOTrainer, name)).parameters)[: len(named)] == named


def test_generate_takes_and_returns_what_trls_does():
    theirs = list(inspect.signature(VLLMGeneration.generate).parameters)
    assert list(inspect.signature(Generation.generate).parameters) == theirs
    assert "return prompt_ids, completion_ids, logprobs, logprob_token_ids" in source(VLLMGeneration.generate)


def test_what_generate_returns_is_unpacked_by_trainer():
    assert (
        source(trl.GRPOTrainer._generate)
        .rstrip()
        .endswith(
            "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
        )
    )
    assert source(trl.RLOOTrainer._generate).rstrip().endswith("return prompt_ids, completion_ids, completions")
    assert (
        source(trl.DistillationTrainer._generate)
        .rstrip()
        .endswith("return prompt_ids, completion_ids, tool_mask, images, tool_images")
    )


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.DistillationTrainer], ids=lambda t: t.__name__)
def test_tool_calling_is_where_it_was(trainer):
    """Two methods that are replaced where the rollout converses, and what tool_calling.py reads of the trainer."""
    first = ["self", "prompt_ids", "images", "multimodal_fields"]
    assert list(inspect.signature(trainer._generate_single_turn).parameters)[:4] == first
    loop = ["self", "prompts", "prompt_ids", "completion_ids", "completions"]
    assert list(inspect.signature(trainer._tool_call_loop).parameters)[:5] == loop
    assert list(inspect.signature(trainer._get_tool_suffix_ids).parameters) == ["self", "tool_messages"]
    body = source(trainer)
    grpo = trainer is trl.GRPOTrainer
    own = (
        ("_sync_tool_dicts", "_async_tool_dicts", "_env_tools", "_environment_pool", "async_loop")
        if grpo
        else ("_tool_dict",)
    )
    for name in (*own, "max_completion_length", "max_tool_calling_iterations", "chat_template", "tools"):
        assert f"self.{name} = " in body or f"self.{name}[" in body or f"self.{name}, " in body, name
    log_probs = "logprobs, " if grpo else ""
    counts = "tool_call_count, tool_failure_count, tool_images"
    assert f"return tool_mask, completions, completion_ids, {log_probs}{counts}" in source(trainer._tool_call_loop)


@pytest.mark.parametrize("trainer", GENERATING, ids=lambda t: t.__name__)
def test_a_batch_is_asked_for_by_step_and_shuffled_by_torchs_generator(trainer):
    """What replay.py sets and restores."""
    body = source(trainer._prepare_inputs)
    assert "if self._step % generate_every == 0 or self._buffered_inputs is None:" in body
    asked, shuffled = "= self._generate_and_score_completions(generation_batch)", "= shuffle_sequence_dict("
    assert body.index(asked) < body.index(shuffled)
    assert "permutation = torch.randperm(batch_size)" in source(trl.trainer.utils.shuffle_sequence_dict)
    assert "self._step += 1" in source(trainer.training_step)
    steps = source(transformers.Trainer._run_epoch)
    assert "grad_norm = self._clip_grad_norm(model)" in steps
    assert "grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)" in steps


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer], ids=lambda t: t.__name__)
def test_rows_are_scored_by_one_method_and_old_log_probs_come_first(trainer):
    """The method that scoring.py replaces. The first call, which deferred.py leaves out, is read first in the loss."""
    given = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    assert trainer.__module__.startswith("trl.trainer.")  # where `overriding` stops to look
    assert "_name" in vars(trainer)
    parameters = list(inspect.signature(trainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[:8] == [*given, "compute_aux_loss"]
    forward = source(trainer._get_per_token_logps_and_entropies)
    assert "with self.accelerator.autocast():" in forward
    assert "outputs = model(**model_inputs, labels=labels, fused_lm_head=True)" in forward
    assert "labels = input_ids_batch.masked_fill(attention_mask_batch == 0, -100)" in forward
    assert "return logps, entropies, aux_loss" in forward
    rollout, loss = source(trainer._generate_and_score_completions), source(trainer._compute_loss)
    calls = rollout.split("self._get_per_token_logps_and_entropies(")
    assert calls[0].rstrip().endswith("old_per_token_logps, _, _ =")
    assert all(call.rstrip().endswith("ref_per_token_logps, _, _ =") for call in calls[1:-1])
    before, after = loss.split("self._get_per_token_logps_and_entropies(")
    for name in ("old_per_token_logps", "old_logps", "importance_sampling_ratio"):
        assert f'"{name}"' not in before
    if trainer is trl.RLOOTrainer:
        assert "old_logps = (old_per_token_logps * completion_mask).sum(1)" in rollout
        assert rollout.count("old_logps") == 3
        assert 'old_logps = inputs["old_logps"]' in after
    else:
        assert 'old_per_token_logps = inputs.get("old_per_token_logps")' in after
        condition = "if self.args.gradient_accumulation_steps % generate_every != 0 or ("
        assert f"{condition}\n            self.use_vllm and self.vllm_importance_sampling_correction" in rollout


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer], ids=lambda t: t.__name__)
def test_a_rollout_is_shuffled_and_split_once_and_its_micro_batches_are_kept(trainer):
    body = source(trainer._prepare_inputs)
    assert "generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)" in body
    assert "self._buffered_inputs = [unsplit_pixel_values_by_grid(batch) for batch in generation_batches]" in body
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in body


def test_the_fused_head_takes_labels_that_are_shifted_already():
    from trl.trainer.utils import add_fused_lm_head

    body = source(add_fused_lm_head)
    assert "self, *args, fused_lm_head=False, labels=None, shift_labels=None" in body
    assert "labels = shift_labels" in body
    assert "mask = labels != -100" in body


def test_names_and_helpers_are_where_they_were():
    assert [t._name for t in GENERATING] == ["GRPO", "RLOO", "Distillation"]
    assert hasattr(DistributedBackend, "gather_params")
    from trl.experimental import gold, iw_opd, sdft, sdpo

    found = {name for module in (gold, iw_opd, sdft, sdpo) for name in dir(module) if name in OWN_ENGINE}
    assert found == OWN_ENGINE
    fields = {"vllm_mode", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_max_model_length"}
    fields |= {"vllm_enable_sleep_mode", "vllm_model_impl", "vllm_structured_outputs_regex", "generation_kwargs"}
    for config in (trl.GRPOConfig, trl.RLOOConfig, trl.DistillationConfig):
        assert fields <= set(config.__dataclass_fields__)


def test_the_head_looks_up_a_function_whose_place_ours_can_take():
    """By name, at each pass, with these arguments; of what it returns, GRPO reads log-probs and entropies."""
    utils = trl.trainer.utils
    body = source(utils.add_fused_lm_head)
    assert "per_token = _ChunkedLogProbFunction.apply(" in body
    assert "compact = _use_triton(hidden_states.device)" in body
    assert "hidden_states[mask] if compact else hidden_states.reshape(-1, hidden_states.size(-1))" in body
    theirs = list(inspect.signature(utils._ChunkedLogProbFunction.forward).parameters)
    names = ["ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping"]
    assert theirs == [*names, "logit_scale", "outputs"]
    assert len(inspect.signature(_Head.apply).parameters) == len(theirs)
    scores = source(trl.GRPOTrainer._get_per_token_logps_and_entropies)
    assert "labels = input_ids_batch.masked_fill(attention_mask_batch == 0, -100)" in scores
    assert "labels[:, :-logits_to_keep] = -100" in scores


def test_the_files_of_a_checkpoint_have_transformers_names():
    for name in ("TRAINER_STATE_NAME", "SCHEDULER_NAME", "OPTIMIZER_NAME", "OPTIMIZER_NAME_BIN"):
        assert getattr(manifest, name) == getattr(transformers.trainer, name)


def test_what_is_read_of_a_trainer_is_there():
    """Each attribute is set by TRL's or transformers' trainers, or is one of their classes."""
    bodies = "".join(source(t) for t in (*GENERATING, transformers.Trainer))
    names = {*StockTrainer.__annotations__} - OURS
    missing = {name for name in names if f"self.{name}" not in bodies and not hasattr(trl.GRPOTrainer, name)}
    assert len(names) > 50
    assert missing == set()


def test_each_method_is_extended_once():
    """`__init__` twice: in front of a user's subclass, and behind it."""
    extended = Counter()
    for owner in trlx_hybrid.GRPOTrainer.__mro__:
        if owner.__module__.startswith("trlx_hybrid."):
            extended.update(name for name in vars(owner) if callable(getattr(trl.GRPOTrainer, name, None)))
    assert extended["__init__"] == 2
    assert {name for name, times in extended.items() if times > 1} == {"__init__"}
    assert len(extended) > 25


def test_the_methods_that_are_extended_are_listed():
    listed = {f.name for f in ast.walk(ast.parse(source(StockTrainer))) if isinstance(f, ast.FunctionDef)}
    ours = {n for n in vars(HybridTrainer) if callable(getattr(trl.GRPOTrainer, n, None)) and n[:2] != "__"}
    assert listed - {"__init__"} == ours
