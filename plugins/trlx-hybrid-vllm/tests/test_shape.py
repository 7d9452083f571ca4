"""Log-probs that depend on the shape of a micro-batch: measured apart from rounding, and not blamed on the engine."""

import copy

import pytest
import torch
import trlx_hybrid
from trlx_hybrid.errors import PolicyError, SyncError
from trlx_hybrid.plugins.hookspecs import hookimpl
from trlx_hybrid.testing.models import tiny_model

SHAPE, ROUNDING = ([f"ratio/{part}/{name}" for name in ("mean", "max")] for part in ("shape", "rounding"))
GAP = "sampling/sampling_logp_difference/max"
SCORINGS = {"at once": {}, "deferred": {"scoring": "packed"}}


def crowded(factor, **config):
    """A model that scales its last hidden states by `factor` where it is given more than 40 tokens at a time."""
    model = tiny_model(**config)
    model.base_model.norm.register_forward_hook(
        lambda module, args, output: output * (factor if output[..., 0].numel() > 40 else 1.0)
    )
    return model


def trained(run, model, hybrid, **given):
    given = {"use_vllm": True, "hybrid": {"engine": "vllm", "weights": "copy"} | hybrid, **given}
    return run(trlx_hybrid.GRPOTrainer, model=model, **given).trainer


def exact_effect(model, batch, factor):
    """(tokens,) float64: how far a crowd moves the log-probs of a batch's first row."""
    prompt, completion = (batch[f"{part}_ids"][0][batch[f"{part}_mask"][0].bool()] for part in ("prompt", "completion"))
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.cat([prompt, completion])[None]).last_hidden_state[0].double()
        logits = [model.lm_head(hidden * f)[len(prompt) - 1 : -1] for f in (1.0, factor)]
    first, second = (row.log_softmax(1).gather(1, completion[:, None])[:, 0] for row in logits)
    return (first - second).abs()


@pytest.mark.parametrize("hybrid", SCORINGS.values(), ids=SCORINGS)
def test_what_the_shape_of_a_micro_batch_does_is_logged_apart_from_rounding(run, hybrid):
    model, factor = crowded(1.0001), 1.0001
    before = copy.deepcopy(model).double()
    trainer = trained(run, model, hybrid, max_steps=2, num_iterations=2)  # the batch of the first step is still there
    measured = [[line[name] for line in trainer.state.log_history if name in line] for name in (*SHAPE, *ROUNDING)]
    assert [len(values) for values in measured] == [1, 1, 1, 1]
    (mean,), (largest,), (rounded,), (most_rounded,) = measured
    effect = exact_effect(before, trainer._buffered_inputs[0], factor)
    assert mean == pytest.approx(float(effect.mean()), rel=0.05)
    assert largest == pytest.approx(float(effect.max()), rel=0.05)
    assert 0 < rounded < most_rounded < 1e-5 < mean


def test_it_is_measured_over_the_ids_that_were_kept(run):
    log = trained(run, crowded(1.0001), {}, max_steps=2, top_k=20, gradient_accumulation_steps=2).state.log_history
    assert ["ratio/shape/max" in line for line in log] == [True, False, False]  # the last one sums up the run
    assert 1e-5 < log[0]["ratio/shape/max"] <= log[0][GAP] + 1e-5
    assert log[0]["ratio/rounding/max"] < 1e-5


@pytest.mark.parametrize("hybrid", SCORINGS.values(), ids=SCORINGS)
def test_what_the_shape_of_a_micro_batch_does_is_not_blamed_on_the_engine(run, hybrid):
    with pytest.raises((PolicyError, SyncError)) as caught:
        trained(run, crowded(1.1), hybrid)
    assert "the trainer's log-probs depend on the micro-batch" in str(caught.value)


def test_the_bound_on_what_the_engine_may_differ_by_is_that_of_fp32(run):
    """A shape that explains a part of a difference excuses nothing: the row alone is held against the same bound."""

    class Spoil:
        @hookimpl
        def trlx_sync_end(self, session, report):
            head = session.live_engine._loader.parameters["lm_head.weight"]
            head += 0.02 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0))

    model = crowded(1.1, tie_word_embeddings=False)
    with pytest.raises(SyncError, match="engine and trainer disagree"):
        trained(run, model, {}, plugins=[Spoil()])
