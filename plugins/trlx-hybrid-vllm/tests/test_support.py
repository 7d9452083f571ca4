"""What is sampled from a part of the vocabulary is scored over that part: the importance ratio is 1."""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
import trlx_hybrid
from trlx_hybrid.errors import ComponentError, ConfigError, SyncError
from trlx_hybrid.plugins.hookspecs import hookimpl
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.testing.processes import rank_reports

sys.path.insert(0, str(Path(__file__).parent))
from dropping import Offers

GAP = "sampling/sampling_logp_difference/max"
RATIO = "sampling/importance_sampling_ratio"
TRUNCATION = "ratio/truncation"
SCRIPT = Path(__file__).parent / "scripts" / "support_distributed.py"

SETTINGS = {
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "min_tokens": {"generation_kwargs": {"min_tokens": 6}},
    "regex": {"vllm_structured_outputs_regex": "[0-9a-f]{3,9}"},
    "bad_words": {"generation_kwargs": {"bad_words": ["5", "a"]}},
    "logit_bias": {"generation_kwargs": {"logit_bias": dict.fromkeys(range(20, 60), -100.0)}},
    "several": {"top_k": 30, "top_p": 0.9, "temperature": 0.7, "generation_kwargs": {"min_tokens": 3}},
    "stop strings": {"top_k": 20, "generation_kwargs": {"stop": ["7", "e"]}},
}


def logged(finished, name):
    return [log[name] for log in finished.trainer.state.log_history if name in log]


def sampled_batch(trainer):
    """The batch that the trainer has drawn last, whole."""
    parts = trainer._buffered_inputs
    return {name: torch.cat([part[name] for part in parts]) for name, v in parts[0].items() if getattr(v, "ndim", 0)}


def oracle(model, batch, temperature):
    """(log-probs over the kept ids, logarithms of their share), (B, C) float64, from dense logits."""
    from trlx_hybrid.contract.support import Support

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    start = batch["prompt_ids"].shape[1]
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(input_ids=ids, attention_mask=mask).logits[:, start - 1 : -1]
    logits, kept = logits / temperature, torch.zeros_like(logits, dtype=torch.bool)
    for row, (words, bounds) in enumerate(zip(batch["support_words"], batch["support_bounds"], strict=True)):
        support = Support(words.numpy(), bounds.numpy(), logits.shape[2])
        for token in range(int(batch["completion_mask"][row].sum())):
            kept[row, token, support.ids(token)] = True
    over = logits.masked_fill(~kept, -torch.inf)
    found = over.gather(2, batch["completion_ids"][..., None])[..., 0] - over.logsumexp(2)
    return found, over.logsumexp(2) - logits.logsumexp(2), kept


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_engine_and_trainer_score_the_same_distribution(run, settings):
    model = tiny_model()
    before = copy.deepcopy(model)
    finished = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, max_steps=1, **settings)
    assert logged(finished, GAP)[0] < 1e-3
    assert logged(finished, f"{RATIO}/min")[0] == pytest.approx(1, abs=1e-3)

    batch, temperature = sampled_batch(finished.trainer), settings.get("temperature", 1.0)
    mask = batch["completion_mask"].bool()
    exact, shares, kept = oracle(before, batch, temperature)
    for name in ("old_per_token_logps", "sampling_per_token_logps"):
        assert (batch[name] - exact)[mask].abs().max() < 1e-3
    assert logged(finished, TRUNCATION)[0] == pytest.approx(float(shares[mask].mean()), abs=1e-4)
    assert logged(finished, TRUNCATION)[0] < -1e-3
    if "top_k" in settings:
        assert (kept.sum(2)[mask] <= settings["top_k"]).all()
    if "logit_bias" in settings.get("generation_kwargs", {}):
        assert not kept[..., 20:60].any()


def test_long_rows_of_a_flat_model_teach_what_short_ones_do(run):
    """With TRL's correction over the whole vocabulary, grad_norm fell from 3.3 to 0.1 here."""
    given = {"use_vllm": True, "max_completion_length": 120, "vllm_max_model_length": 160, "max_steps": 1}
    given |= {"generation_kwargs": {"ignore_eos": True}}

    def flat():
        return tiny_model(max_position_embeddings=256)

    whole, truncated = (run(trlx_hybrid.GRPOTrainer, model=flat(), top_k=k, **given) for k in (0, 50))
    assert logged(truncated, f"{RATIO}/min")[0] == pytest.approx(1, abs=1e-3)
    assert logged(truncated, "grad_norm")[0] > 0.5 * logged(whole, "grad_norm")[0]
    assert logged(truncated, "entropy")[0] < logged(whole, "entropy")[0]


class Spoil:
    """Moves the engine's head behind the proofs, from weight version 2 on: by some 0.1 nats."""

    @hookimpl
    def trlx_sync_end(self, session, report):
        if report.version == 2:
            head = session.live_engine._loader.parameters["lm_head.weight"]
            head += 0.02 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "min_tokens", "regex", "bad_words"])
def test_an_engine_with_other_weights_is_found_under_each_setting(run, name):
    given = {"use_vllm": True, "plugins": [Spoil()], "hybrid": {"weights": "copy"}, "max_steps": 4}
    model = tiny_model(tie_word_embeddings=False)
    with pytest.raises(SyncError, match=r"At step 2, engine and trainer disagree"):
        run(trlx_hybrid.GRPOTrainer, model=model, **given, **SETTINGS[name])


# --- whatever brings the rows to their loss ---------------------------------------------------------------------------

SHAPES = {
    "accumulated": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
    "several iterations": {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4},
    "a reference": {"beta": 0.1, "peft": True},
    "entropy masks": {"top_entropy_quantile": 0.5},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
}


def shaped(run, prompts, shape, **given):
    from peft import LoraConfig

    given = {"use_vllm": True, "max_steps": 2, "top_k": 20, **shape, **given}
    if given.pop("peft", False):
        given["peft_config"] = LoraConfig(target_modules=["q_proj", "v_proj"])
    if "eval_strategy" in given:
        given["eval_dataset"] = prompts.select(range(8))
    finished = run(trlx_hybrid.GRPOTrainer, model=tiny_model(), **given)
    finished.close()
    return finished


PACKED = {
    "packed": {"deferred": False},
    "deferred": {},
    "balanced": {"balanced": True},
    "joined": {"adaptive_checkpointing": True, "joined": True},
}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        pytest.param(
            PACKED[options],
            SHAPES[shape],
            id=f"{options}, {shape}",
            marks=[] if options == "joined" or shape == "accumulated" else [pytest.mark.slow],
        )
        for options in PACKED
        for shape in SHAPES
    ],
)
def test_packed_rows_are_scored_as_padded_ones(run, prompts, shape, options):
    padded = shaped(run, prompts, shape)
    packed = shaped(run, prompts, shape, hybrid={"scoring": "packed", "scoring_options": options})
    assert max(logged(packed, GAP)) < 1e-4
    names = ["loss", "grad_norm", "entropy", "kl", TRUNCATION]
    if "gradient_accumulation_steps" in shape:  # other rows share a micro-batch, and TRL logs the mean of their means
        names = names[:2]
    for name in names:
        assert logged(packed, name) == pytest.approx(logged(padded, name), abs=1e-4)


def test_a_recorded_run_is_replayed_over_its_support(run, prompts, tmp_path):
    recorded = shaped(run, prompts, {"hybrid": {"record": str(tmp_path / "kept")}})
    again = shaped(run, prompts, {"use_vllm": False, "hybrid": {"replay": str(tmp_path / "kept")}})
    assert logged(recorded, TRUNCATION)
    assert again.logs == recorded.logs
    weights = again.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in recorded.weights().items())


def test_rows_of_several_rounds_keep_their_support(run, prompts):
    hybrid = {"algorithm": ["dynamic_sampling"], "algorithm_options": {"dynamic_sampling": {"rounds": 2}}}
    finished = shaped(run, prompts, {"hybrid": hybrid})
    assert max(logged(finished, GAP)) < 1e-4
    assert logged(finished, TRUNCATION)


# --- what is not known is an error ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"rollout": "forgetful"}, "rollout 'forgetful' .* brought 8 of 8 rows, .*top_k=20 leaves some out"),
        ({"scoring": "careless"}, "scoring 'careless' leaves out the support"),
    ],
)
def test_a_component_that_drops_the_support_is_named(run, chosen, said):
    with pytest.raises(ComponentError, match=said):
        run(trlx_hybrid.GRPOTrainer, top_k=20, hybrid={"engine": "vllm"} | chosen, plugins=[Offers()])
    run(trlx_hybrid.GRPOTrainer, max_steps=1, hybrid={"engine": "vllm", "rollout": "forgetful"}, plugins=[Offers()])


def test_a_batch_without_its_support_is_an_error(run):
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, top_k=20, train=False, steps_per_generation=2, max_steps=2)
    trainer = finished.trainer
    drawn = trainer._prepare_inputs

    def made_anew(batch):
        return {name: value for name, value in drawn(batch).items() if not name.startswith("support")}

    trainer._prepare_inputs = made_anew
    with pytest.raises(ConfigError, match="top_k=20 leaves ids out, and this batch does not say"):
        trainer.train()


def test_what_the_engine_cannot_say_is_refused_or_told(run):
    draft = {"engine_options": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}}
    with pytest.raises(
        ComponentError, match="with speculative_config vLLM does not say which ids it kept, and top_k=20"
    ):
        run(trlx_hybrid.GRPOTrainer, train=False, top_k=20, hybrid={"engine": "vllm"} | draft)

    def own(prompts, trainer):
        raise AssertionError

    trainer = run(trlx_hybrid.GRPOTrainer, train=False, use_vllm=True, top_k=20, rollout_func=own).trainer
    assert any("top_k=20 leaves ids out, and a rollout_func brings" in note for note in trainer.session.notes)


# --- tokens without a log-prob ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
@pytest.mark.parametrize("hybrid", [{}, {"scoring": "packed"}], ids=["at once", "deferred"])
def test_tokens_whose_log_prob_nobody_knows_are_counted_and_count_for_nothing(run, mode, hybrid):
    def some(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        known = [-4.5, float("nan"), -4.5]
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 7]] * len(ids), "logprobs": [known] * len(ids)}

    given = {"rollout_func": some, "vllm_importance_sampling_mode": mode, "max_steps": 1, "contrast": 1.0}
    finished = run(trlx_hybrid.GRPOTrainer, use_vllm=True, hybrid={"engine": "vllm"} | hybrid, **given)
    assert logged(finished, "ratio/unscored_tokens") == [8]
    ratio = sampled_batch(finished.trainer)["importance_sampling_ratio"]
    assert ratio.shape == (8, 3)
    assert (ratio[:, 1] == 0).all()
    assert (ratio[:, [0, 2]] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2], ids=["an engine each", "one engine"])
def test_ranks_score_over_the_ids_of_their_own_rows(tmp_path, size):
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    for log in rank_reports(SCRIPT, tmp_path, size, count=2, environment=environment):
        lines = [line for line in log if TRUNCATION in line]
        assert len(lines) == 2
        assert max(line[GAP] for line in lines) < 1e-3
        assert max(line[TRUNCATION] for line in lines) < -0.01
