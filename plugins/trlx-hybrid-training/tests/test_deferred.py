"""Old log-probs from the first loss forward: bit for bit what TRL computes in a forward pass of its own."""

import sys
from pathlib import Path

import pytest
import torch
import trl
import trlx_hybrid
from torch import nn
from transformers import TrainerCallback
from trl import RLOOConfig
from trlx_hybrid import hookimpl
from trlx_hybrid.errors import ConfigError, PolicyError, StaleWeightsError, SyncError
from trlx_hybrid.testing.models import tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from scripted import lora, masked

DEFERRED = {"packing": False}
TWO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
AGAIN = TWO | {"num_iterations": 2}  # in the second step, the ratio to the old log-probs is not 1
LOSSES = "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"
TRUNCATED = {"mask_truncated_completions": True, "max_completion_length": 4}  # with 12, a row seldom is

CASES = {
    **{loss: AGAIN | {"loss_type": loss} for loss in LOSSES},
    "luspo, sequences": AGAIN | {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    **{f"scale {scale}": TWO | {"scale_rewards": scale} for scale in ("batch", "none")},
    "high entropy": AGAIN | {"top_entropy_quantile": 0.3701},
    "entropy bonus": AGAIN | {"entropy_coef": 0.1},
    "sequence_mask": TWO,
    "sequence_mask that drops some": TWO | {"vllm_importance_sampling_clip_max": 1.0},
    "sequence_truncate": TWO | {"vllm_importance_sampling_mode": "sequence_truncate"},
    "token_truncate": TWO
    | {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.1},
    "token_mask": TWO | {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.1},
    "vespo": AGAIN | {"vllm_importance_sampling_mode": "token_truncate", "loss_type": "vespo"},
    "two iterations, KL, adapters": TWO | {"num_iterations": 2, "beta": 0.1, "peft_config": lora(), "max_steps": 3},
    "two rollouts in one step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 2},
    "tool masks and unknown log-probs": TWO | {"rollout_func": masked},
    "truncated ones masked": TWO | TRUNCATED,
    "both masks": TWO | TRUNCATED | {"rollout_func": masked},
    "off-policy mask": {"off_policy_mask_threshold": 0.01, "importance_sampling_level": "sequence"},
    "evaluation": TWO | {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_grpo_is_bit_for_bit_what_it_was_without_the_forward_pass(compared, noisy, prompts, case):
    given = dict(CASES[case])
    if "eval_strategy" in given:
        given["eval_dataset"] = prompts.select(range(2))
    stock, ours = compared(trlx_hybrid.GRPOTrainer, DEFERRED, noisy, **given)
    assert ours.logs == stock.logs
    assert "sampling/importance_sampling_ratio/mean" in stock.logs[0]
    if given.get("mask_truncated_completions"):
        assert 0 < stock.logs[0]["completions/clipped_ratio"] < 1
    assert all(torch.equal(w, stock.weights()[name]) for name, w in ours.weights().items())
    reference = stock.forwards[0] // 2 if given.get("beta") else 0
    evaluated = given.get("max_steps", 2) * 2 if "eval_strategy" in given else 0  # two batches, without gradients
    assert stock.forwards[0] > ours.forwards[0] == reference + evaluated
    assert ours.forwards[1] == stock.forwards[1]


def scoring(prompts, trainer):
    """A rollout of the user's whose log-probs are those that the trainer computes."""
    rollout = masked(prompts, trainer)
    del rollout["env_mask"]
    rollout["logprobs"] = []
    for prompt, completion in zip(rollout["prompt_ids"], rollout["completion_ids"], strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            scores = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, torch.ones_like(ids), len(completion)
            )
        rollout["logprobs"].append(scores[0][0].tolist())
    return rollout


def test_a_rollout_may_ask_the_trainer_for_log_probs(compared, noisy):
    """Only what TRL asks for afterwards is left to the loss."""
    stock, ours = compared(trlx_hybrid.GRPOTrainer, DEFERRED, noisy, rollout_func=scoring, **TWO)
    assert ours.logs == stock.logs
    assert ours.logs[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("case", ["TRL generates", "RLOO"])
def test_what_reads_old_log_probs_without_a_correction_as_well(compared, noisy, case):
    trainer, given, hybrid = trlx_hybrid.GRPOTrainer, {}, {}
    if case == "RLOO":
        trainer, given, hybrid = trlx_hybrid.RLOOTrainer, {"config_class": RLOOConfig, "beta": 0.0}, noisy
    stock, ours = compared(trainer, DEFERRED, hybrid, num_iterations=2, max_steps=3, **TWO, **given)
    assert ours.logs == stock.logs
    assert all(torch.equal(w, stock.weights()[name]) for name, w in ours.weights().items())
    assert stock.forwards[0] > ours.forwards[0] == 0


class Reader(trlx_hybrid.GRPOTrainer):
    """Sees the batch with its old log-probs."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        assert batch["old_per_token_logps"].any()
        return batch


class Own(trl.GRPOTrainer):
    """Scores in a way of its own."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class Adviser:
    @hookimpl
    def trlx_advantages(self, batch):
        assert batch["old_per_token_logps"].any()


GRPO, RLOO = trlx_hybrid.GRPOTrainer, trlx_hybrid.RLOOTrainer
APART = {
    "a trainer of the user's": (Reader, {}, "Reader._generate_and_score_completions may read them."),
    "a plugin": (GRPO, {"plugins": [Adviser()]}, "trlx_advantages of plugin 'Adviser-1' may read them."),
    "KL in the rewards": (RLOO, {"config_class": RLOOConfig, "beta": 0.1, "peft_config": lora()}, "RLOO takes the KL"),
    "several steps per rollout": (GRPO, {"steps_per_generation": 2}, "a rollout is 2 micro-batches"),
    "dropout": (GRPO, {"peft_config": lora(lora_dropout=0.5)}, "lora_dropout.default.p=0.5 makes each forward pass"),
}


@pytest.mark.parametrize("case", APART)
def test_where_the_first_forward_is_not_it_the_old_log_probs_are_trls_and_the_run_says_so(
    compared, noisy, case, capsys, caplog
):
    trainer, given, reason = APART[case]
    stock, ours = compared(trainer, DEFERRED, noisy, **{"max_steps": 1} | given)
    said = capsys.readouterr().err + caplog.text
    assert f"ld log-probs take a forward pass of their own: {reason}" in said.replace("module.", "") or reason in said
    assert ours.logs == stock.logs
    assert ours.forwards == stock.forwards


class Drop(TrainerCallback):
    """Puts dropout into the model after the first step, in the place of a layer that has no weights."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        mlp = model.model.layers[0].mlp
        if not isinstance(mlp.act_fn, nn.Sequential):
            mlp.act_fn = nn.Sequential(mlp.act_fn, nn.Dropout(0.5))


@pytest.mark.parametrize(("trainer", "engine"), [(GRPO, "scripted"), (RLOO, None)], ids=["an engine", "TRL generates"])
def test_dropout_that_comes_later_is_noticed_before_the_next_rollout(run, scripted, trainer, engine, caplog):
    said = []

    class Saying(Drop):
        def on_step_begin(self, *args, **kwargs):
            said.append("Dropout" in caplog.text or "0.5 makes each forward pass" in caplog.text)

    hybrid = {"scoring": "packed", "scoring_options": DEFERRED} | ({"engine": engine} if engine else {})
    given = {"config_class": RLOOConfig, "beta": 0.0} if trainer is RLOO else {}
    trained = run(trainer, hybrid=hybrid, plugins=[scripted], callbacks=[Saying()], max_steps=3, **TWO | given)
    trained.close()
    assert said == [False, False, True]
    assert "act_fn.1.p=0.5 makes each forward pass another one" in caplog.text


def test_a_rollout_that_two_steps_share_takes_them_apart(compared, noisy):
    """Of three rollouts of two micro-batches, in steps of three, the second."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "steps_per_generation": 2}
    stock, ours = compared(GRPO, DEFERRED, noisy, **given)
    assert ours.logs == stock.logs
    assert (stock.forwards[0], ours.forwards[0]) == (3, 1)
    assert all(torch.equal(w, stock.weights()[name]) for name, w in ours.weights().items())


def test_an_engine_with_other_weights_is_found_before_they_are_trained_on(run, noisy, scripted):
    errors = []
    for scoring in ({"scoring": "padded"}, {"scoring": "packed", "scoring_options": DEFERRED}):
        with pytest.raises(SyncError, match="disagree on what was sampled") as caught:
            run(GRPO, hybrid={"engine": "scripted"} | scoring, plugins=[scripted], callbacks=[NoStep()], **TWO)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


class Break(TrainerCallback):
    """What a step whose gradient was NaN leaves."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model.get_input_embeddings().weight[0] = float("nan")


def test_weights_that_a_step_broke_end_the_next_rollout(run, noisy, scripted):
    for scoring in ({"scoring": "padded"}, {"scoring": "packed", "scoring_options": DEFERRED}):
        with pytest.raises(PolicyError, match=r"At step 1, .* no numbers: on rank 0, .* model\.embed_tokens\.weight"):
            run(GRPO, hybrid=noisy | scoring, plugins=[scripted], callbacks=[Break()], **TWO)


class NoStep(TrainerCallback):
    def on_optimizer_step(self, *args, **kwargs):
        raise AssertionError("the weights have changed")


class Change(TrainerCallback):
    """Says that weights were changed by hand, between two micro-batches of one step."""

    def on_substep_end(self, args, state, control, **kwargs):
        self.session.weights_changed()


def test_weights_that_change_within_a_step_stop_the_run(run, noisy, scripted):
    change = Change()
    hybrid = noisy | {"scoring": "packed", "scoring_options": DEFERRED}
    started = run(GRPO, hybrid=hybrid, plugins=[scripted], callbacks=[change], train=False, **TWO)
    change.session = started.trainer.session
    with pytest.raises(StaleWeightsError, match=r"sampled at weight version 0, .* at 1.*'deferred': False"):
        started.trainer.train()


def test_settings_that_nothing_would_read_are_refused(run):
    from trl import DistillationConfig

    with pytest.raises(ConfigError, match="cannot serve DistillationTrainer: it is none of GRPO and RLOO"):
        run(
            trlx_hybrid.DistillationTrainer,
            config_class=DistillationConfig,
            teacher_model=tiny_model(seed=1),
            hybrid={"scoring": "packed"},
        )
    with pytest.raises(ConfigError, match=r"cannot serve Own: .*Own._get_per_token_logps_and_entropies computes its"):
        run(trlx_hybrid.hybrid(Own), hybrid={"scoring": "packed"})
    with pytest.raises(ConfigError, match="HybridEngine scores nothing"):
        trlx_hybrid.HybridEngine(None, None, max_tokens=1, config=trlx_hybrid.HybridConfig(scoring="padded"))
    with pytest.raises(ConfigError, match=r"scoring 'packed' has no setting 'defered'. Did you mean 'deferred'"):
        run(GRPO, hybrid={"scoring": "packed", "scoring_options": {"defered": True}})
    with pytest.raises(ConfigError, match="deferred is True or False, got 'no'"):
        run(GRPO, hybrid={"scoring": "packed", "scoring_options": {"deferred": "no"}})


@pytest.mark.parametrize("scoring", ["packed", None], ids=["packed again", "padded"])
def test_a_replay_takes_them_from_its_own_first_loss_forward(run, noisy, scripted, tmp_path, scoring):
    settings = {"num_iterations": 2, "max_steps": 3, "rollout_func": masked} | TWO
    options = {"scoring": "packed", "scoring_options": DEFERRED}
    recorded = run(
        trlx_hybrid.GRPOTrainer, hybrid=noisy | options | {"record": str(tmp_path)}, plugins=[scripted], **settings
    )
    options = options if scoring else {}
    replayed = run(trlx_hybrid.GRPOTrainer, hybrid=options | {"replay": str(tmp_path)}, **settings)
    assert replayed.logs == recorded.logs
    assert all(torch.equal(w, recorded.weights()[name]) for name, w in replayed.weights().items())
