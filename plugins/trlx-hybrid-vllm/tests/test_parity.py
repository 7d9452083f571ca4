"""Table-driven: the vLLM engine against stock TRL colocate, greedy, on an untied model. Same ids, same rewards.

Stock TRL's engine is made to keep plain weights on a CPU (conftest.py); TRL itself runs as published.
"""

import pytest
import torch
import trl
import trlx_hybrid
from transformers import AutoModelForCausalLM
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

pytestmark = pytest.mark.usefixtures("stock_colocate")


@pytest.fixture
def saved_model(tmp_path):
    """Stock TRL loads its engine from a folder, so the model has to have one."""

    def save(model=None):
        model = model if model is not None else tiny_model()
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
        return lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    return save


CASES = {
    "plain": {},
    "rloo": {"trainer": "RLOO", "beta": 0.0},
    "num_generations_eval": {"num_generations_eval": 2, "eval_strategy": "steps", "eval_steps": 2, "evaluate": True},
    "eval_on_start": {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2, "evaluate": True},
    "off_policy_window": {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 6},
    "sync_ref_model": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 4},
    "gradient_accumulation": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "stop_strings": {"generation_kwargs": {"stop": ["7", "a"]}},
    "stop_token_ids": {"generation_kwargs": {"stop_token_ids": [40, 50, 60]}},
    "regex": {"vllm_structured_outputs_regex": "[0-9]{3,6}"},
    "structured_outputs": {"generation_kwargs": {"structured_outputs": {"choice": ["12 ab", "ab 12"]}}},
    "top_k_minus_one": {"top_k": -1, "generation_kwargs": {"temperature": 0.0}},
    "two_generations": {"num_generations": 2, "per_device_train_batch_size": 2},
    "repetition_penalty": {"repetition_penalty": 1.3, "generation_kwargs": {"min_tokens": 4}},
    # Greedy by its temperature: after `top_k` both sides would score over one id, and stock TRL over all.
    "importance_sampling": {
        "vllm_importance_sampling_correction": True,
        "top_k": 0,
        "generation_kwargs": {"temperature": 0.0},
    },
    "unscaled_rewards": {"scale_rewards": "none"},
}


def arm(run, trainer_class, model, case, **more):
    case = dict(case)
    name = case.pop("trainer", "GRPO")
    # Greedy log-probs are 0, so TRL's importance-sampling correction would mask every sequence and nothing would be
    # learned; and a group's completions are equal, so the reward has to tell them apart by their place.
    given = {"vllm_importance_sampling_correction": False, "contrast": 1.0, "learning_rate": 1e-2, "top_k": 1}
    given |= {"config_class": getattr(trl, f"{name}Config"), "use_vllm": True, **case, **more}
    if given.pop("evaluate", False):
        from datasets import Dataset

        given["eval_dataset"] = Dataset.from_dict({"prompt": [f"eval {i}=" for i in range(8)]})
        given["per_device_eval_batch_size"] = 4
    if trainer_class is ours:
        given["hybrid"] = {"scoring": "padded"} | given.get("hybrid", {})  # TRL's own numbers
    return run(trainer_class(name), model=model, **given)


def stock(name):
    return getattr(trl, f"{name}Trainer")


def ours(name):
    return getattr(trlx_hybrid, f"{name}Trainer")


OF_ENDED = ("clipped_ratio", "mean_terminated_length", "min_terminated_length", "max_terminated_length")


def without(log, name):
    return {key: value for key, value in log.items() if not key.endswith(name)}


def assert_same(mine, theirs, tolerance=2e-4):
    completions = mine.recorder.completions
    assert completions == theirs.recorder.completions
    assert mine.recorder.kwargs == theirs.recorder.kwargs
    assert len(mine.logs) == len(theirs.logs)
    # Where a completion happens to be cut right behind a sampled padding token, TRL takes it for ended, and we do not.
    pad = mine.trainer.processing_class.pad_token_id
    apart = OF_ENDED if any(ids[-1:] == [pad] for ids in completions) else ()
    for log, expected in zip(mine.logs, theirs.logs, strict=True):
        assert log.keys() == expected.keys()
        for name in apart:
            log, expected = (without(of, f"completions/{name}") for of in (log, expected))
        assert log == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_same_ids_rewards_and_logs_as_stock_colocate(run, saved_model, case):
    load = saved_model()
    theirs = arm(run, stock, load(), case)
    theirs.close()
    mine = arm(run, ours, load(), case)
    assert_same(mine, theirs)
    start, end = load(), mine.trainer.model
    if not case.get("vllm_importance_sampling_correction"):
        assert not torch.equal(start.lm_head.weight, end.lm_head.weight)  # it learned something


def interrupted(run, which, load, stop_at):
    """A whole run, and one that goes on from its checkpoint. Steps 1-3 and 4-6 share one generation each."""
    case = {"steps_per_generation": 3, "max_steps": 6, "save_strategy": "steps", "save_steps": stop_at}
    first = arm(run, which, load(), case)
    first.close()
    resumed = arm(run, which, load(), case, resume=f"{first.trainer.args.output_dir}/checkpoint-{stop_at}")
    resumed.close()
    return first, resumed


def test_interrupted_at_a_rollouts_edge_and_resumed_like_stock(run, saved_model):
    load = saved_model()
    for mine, theirs in zip(interrupted(run, ours, load, 3), interrupted(run, stock, load, 3), strict=True):
        assert_same(mine, theirs)


def test_interrupted_within_a_rollout_and_resumed_like_the_whole_run(run, saved_model):
    """TRL samples anew there, and takes all later rollouts at other steps."""
    first, resumed = interrupted(run, ours, saved_model(), 2)
    assert len(resumed.recorder.completions) == len(first.recorder.completions) // 2
    assert resumed.recorder.completions == first.recorder.completions[-len(resumed.recorder.completions) :]
    assert resumed.logs[:-1] == first.logs[:-1]  # the last one averages a loss over the steps of this start


@pytest.mark.slow
def test_best_model_at_end_is_what_is_sampled_afterwards(run, saved_model):
    load = saved_model()
    case = {
        "max_steps": 4,
        "learning_rate": 5e-2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "greater_is_better": True,
        "evaluate": True,
    }
    theirs = arm(run, stock, load(), case)
    theirs.close()
    mine = arm(run, ours, load(), case)
    assert (
        mine.trainer.state.best_model_checkpoint.split("-")[-1]
        == theirs.trainer.state.best_model_checkpoint.split("-")[-1]
    )
    assert_same(mine, theirs)
    # Stock TRL would sample from the last step's weights here; ours follows the load, which bumped no step.
    before = mine.trainer.session.versions.engine_version
    sampled = len(mine.recorder.completions)
    mine.trainer.evaluate()
    assert mine.trainer.session.versions.engine_version > before
    best = AutoModelForCausalLM.from_pretrained(mine.trainer.state.best_model_checkpoint)
    evaluated = list(zip(mine.recorder.prompts, mine.recorder.completions, strict=True))[sampled:]
    assert len(evaluated) == 32
    for prompt, ids in evaluated:
        prompt_ids = character_tokenizer()(prompt)["input_ids"]
        with torch.no_grad():
            logits = best(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids


def test_bf16_engine_from_fp32_masters(run, saved_model, stock_colocate):
    """Kernels round differently in bf16 only where they differ; on one machine both arms run the same ones."""
    load = saved_model()
    stock_colocate["dtype"] = "bfloat16"
    theirs = arm(run, stock, load(), {"bf16": True})
    theirs.close()
    mine = arm(run, ours, load(), {"bf16": True})
    assert mine.trainer.session.live_engine.dtype is torch.bfloat16
    assert next(mine.trainer.model.parameters()).dtype is torch.float32
    assert mine.recorder.completions == theirs.recorder.completions


def test_added_tokens_and_resized_embeddings(run, saved_model):
    """The engine is built from the live model, so it has the new rows; a saved copy shows stock TRL the same."""
    model = tiny_model()
    torch.manual_seed(0)
    model.resize_token_embeddings(120, mean_resizing=False)
    load = saved_model(model)
    theirs = arm(run, stock, load(), {})
    theirs.close()
    live = tiny_model()
    torch.manual_seed(0)
    live.resize_token_embeddings(120, mean_resizing=False)
    mine = arm(run, ours, live, {})
    assert_same(mine, theirs)


def test_a_model_built_from_a_config_needs_no_folder(run, saved_model):
    load = saved_model()
    theirs = arm(run, stock, load(), {})
    theirs.close()
    model = tiny_model()
    assert model.name_or_path == ""
    assert_same(arm(run, ours, model, {}), theirs)


def test_two_trainers_one_after_another_and_back(run):
    """One engine lives in a process at a time: the second trainer takes it over, the first gets it back."""
    first = run(trlx_hybrid.GRPOTrainer, use_vllm=True, top_k=1, max_steps=2)
    second = run(trlx_hybrid.GRPOTrainer, use_vllm=True, top_k=1, max_steps=2)
    assert first.trainer.session.engine is None
    assert second.recorder.completions == first.recorder.completions
    from datasets import Dataset

    first.trainer.evaluate(Dataset.from_dict({"prompt": ["eval 1=", "eval 2="] * 4}))
    assert first.trainer.session.engine is not None
    assert second.trainer.session.engine is None


def test_distillation_trains_through_the_engine(run):
    finished = run(
        trlx_hybrid.DistillationTrainer,
        config_class=trl.DistillationConfig,
        teacher_model=tiny_model(seed=1),
        use_vllm=True,
    )
    assert finished.trainer.session.versions.engine_version == 2
    assert len([log for log in finished.logs if "loss" in log]) == 3
