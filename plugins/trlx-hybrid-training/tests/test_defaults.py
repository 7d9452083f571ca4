"""What a run gets that changes its import and names an engine, and asks for nothing: packed rows, joined passes, LoRA
layers, each where it proves itself, else TRL's and PEFT's way."""

import json
import sys
from pathlib import Path

import pytest
import torch
import trlx_hybrid
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid_training import lora as lora_layers
from trlx_hybrid_training.options import BEFORE

sys.path.insert(0, str(Path(__file__).parent))
from scripted import STEPS, Offer, difference, lora

GRPO = trlx_hybrid.GRPOTrainer
PADDED = {"scoring": "padded"}
BOUND = 1e-5


@pytest.fixture
def start(run, noisy, passes):
    """`start(hybrid, **arguments)`: a run with these settings beside the engine's, and adapters where asked for."""

    def started(hybrid=None, adapters=False, trainer=GRPO, resume=None, **given):
        given = STEPS | ({"peft_config": lora()()} if adapters else {}) | given
        finished = run(trainer, hybrid=noisy | (hybrid or {}), plugins=[Offer()], train=False, **given)
        finished.trainer.train(resume_from_checkpoint=resume and str(resume))
        finished.close()
        return finished

    return started


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_an_engine_is_enough(start, passes, capsys, adapters):
    padded = start(PADDED, adapters)
    assert not passes
    capsys.readouterr()
    ours = start(adapters=adapters)
    header = capsys.readouterr().err
    assert "scoring=packed (auto)" in header
    assert "micro-batches share a pass as far as memory allows" in header
    assert ("LoRA layers: 14 of 14 compute in fewer passes" in header) == adapters
    assert ours.trainer.session.scoring.padded_because is None
    assert passes[-1] == 4
    assert max(difference(ours, padded)) < BOUND


def test_one_word_switches_each_off(start, passes, capsys):
    start({"scoring": "packed", "scoring_options": BEFORE}, adapters=True)
    assert not passes
    header = capsys.readouterr().err
    assert "LoRA layers" not in header
    assert "recomputed" not in header
    start({"plugin_options": {"training": {"lora_layers": False}}}, adapters=True)
    assert "LoRA layers" not in capsys.readouterr().err


def test_a_class_that_computes_log_probs_itself_keeps_them(start, capsys):
    class Own(GRPO):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    own, padded = start(trainer=Own), start(PADDED)
    assert "._get_per_token_logps_and_entropies computes its log-probs)" in capsys.readouterr().err
    assert own.logs == padded.logs


def test_a_wrong_lora_layer_stays_pefts_by_name(start, monkeypatch, caplog):
    padded = start(PADDED, adapters=True)

    def parts(layer, stock=lora_layers._parts):
        found = stock(layer)
        wrong = not isinstance(found, str) and layer.out_features == layer.in_features  # q and o
        return (*found[:4], found[4] * 2, found[5]) if wrong else found

    monkeypatch.setattr(lora_layers, "_parts", parts)
    ours = start(adapters=True)
    named = [r.message for r in caplog.records if "computes as in PEFT: it would differ" in r.message]
    assert named
    assert all(".q_proj" in text or ".o_proj" in text for text in named)
    assert max(difference(ours, padded)) < BOUND


def test_a_model_that_computes_joined_rows_otherwise_gets_a_pass_for_each_micro_batch(start, passes, caplog):
    """Packed rows prove themselves on the rows of one micro-batch; this model goes wrong with more of them."""

    def wrong(model):
        def after(module, args, output):
            return output * 1.1 if args[0].shape[1] > most[0] else output

        model.get_input_embeddings().register_forward_hook(after)
        return model

    most = [1 << 30]
    padded = start(PADDED, model=wrong(tiny_model("qwen2")))
    most = [110]
    ours = start(model=wrong(tiny_model("qwen2")))
    assert "Each micro-batch takes a forward pass of its own: log-probs of a shared one differ by up to" in caplog.text
    assert ours.trainer.session.scoring.padded_because is None
    assert max(difference(ours, padded)) < BOUND


def steps(finished):
    return [log for log in finished.logs if "loss" in log]


SAVED = STEPS | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def test_a_resumed_run_joins_what_the_whole_run_joined(start, passes, tmp_path):
    whole = start(output_dir=str(tmp_path / "whole"), **SAVED)
    asked = list(passes)
    passes.clear()
    resumed = start(output_dir=str(tmp_path / "whole"), resume=tmp_path / "whole" / "checkpoint-2", **SAVED)
    assert passes == asked[-len(passes) :] == [4, 4]
    assert steps(resumed)[-2:] == steps(whole)[-2:]
    weights = whole.weights()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.weights().items())


def let_differ(patch, what):
    """Let the comparisons of packed rows, LoRA layers or shared passes find a difference."""
    of_rows = "trlx_hybrid_training.scoring.beyond_rounding"
    of_passes = "trlx_hybrid.trl.scoring.scoring_call.beyond_rounding"
    if what == "layers":
        patch.setattr(lora_layers, "difference", lambda *given: 1.0)
    else:
        patch.setattr(of_rows if what == "rows" else of_passes, lambda *given: "differ")


def left_out(caplog):
    """The warnings that say what a comparison has left out."""
    return [r for r in caplog.records if "compute" in r.message or "stay padded" in r.message or "own" in r.message]


@pytest.mark.parametrize("what", ["rows", "layers", "passes"])
def test_a_resumed_run_leaves_out_what_the_whole_run_left_out(start, passes, monkeypatch, caplog, tmp_path, what):
    """The checkpoint says so: the rows that a resumed run compares may happen to agree."""
    given = SAVED | {"output_dir": str(tmp_path), "adapters": what == "layers"}
    with monkeypatch.context() as differing:
        let_differ(differing, what)
        whole = start(**given)
    asked = list(passes)
    passes.clear()
    caplog.clear()
    resumed = start(resume=tmp_path / "checkpoint-2", **given)
    assert passes == asked[len(asked) - len(passes) :]
    assert steps(resumed)[-2:] == steps(whole)[-2:]
    assert resumed.trainer.session.scoring.padded_because == whole.trainer.session.scoring.padded_because
    assert not left_out(caplog)
    weights = whole.weights()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.weights().items())


@pytest.mark.parametrize("what", ["rows", "layers", "passes"])
def test_a_resumed_run_keeps_what_the_whole_run_found_alike(start, passes, monkeypatch, caplog, tmp_path, what):
    """Other rows might differ by rounding: then it would be another run. With another version all is compared again."""
    given = SAVED | {"output_dir": str(tmp_path), "adapters": what == "layers"}
    whole = start(**given)
    let_differ(monkeypatch, what)
    caplog.clear()
    resumed = start(resume=tmp_path / "checkpoint-2", **given)
    assert steps(resumed)[-2:] == steps(whole)[-2:]
    weights = whole.weights()
    assert all(torch.equal(value, weights[name]) for name, value in resumed.weights().items())
    assert not left_out(caplog)
    monkeypatch.setattr("trlx_hybrid_training.scoring.release_of", lambda name: "another")
    start(resume=tmp_path / "checkpoint-2", **given)
    assert left_out(caplog)


def test_so_does_one_that_asks_for_packed_rows_where_trl_samples(run, passes, tmp_path):
    given = SAVED | {"output_dir": str(tmp_path), "hybrid": {"scoring": "packed"}, "train": False}
    whole, resumed = run(GRPO, **given), run(GRPO, **given)
    whole.trainer.train()
    passes.clear()
    resumed.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert passes == [4, 4]
    assert steps(resumed)[-2:] == steps(whole)[-2:]


@pytest.mark.parametrize("names", [True, False], ids=["that names it", "of an earlier release"])
def test_a_run_from_a_checkpoint_scores_on_as_it_did(start, passes, tmp_path, capsys, names):
    """To the bit: it is the run that was interrupted, and the default has changed since."""
    folder = tmp_path / "padded"
    whole = start(PADDED, output_dir=str(folder), **SAVED)
    state = folder / "checkpoint-2" / "hybrid_state.json"
    if not names:
        (state.parent / "trlx_hybrid_manifest.json").unlink()  # it has the file's digest
        kept = json.loads(state.read_text())
        del kept["scoring"]
        state.write_text(json.dumps(kept))
    capsys.readouterr()
    resumed = start(output_dir=str(folder), resume=folder / "checkpoint-2", **SAVED)
    assert "scoring=padded (as in the checkpoint)" in capsys.readouterr().err
    assert not passes
    assert steps(resumed)[-2:] == steps(whole)[-2:]


def test_a_recording_trains_as_it_was_scored(start, tmp_path, capsys):
    recorded = start(PADDED | {"record": str(tmp_path / "padded")})
    replayed = start({"engine": None, "replay": str(tmp_path / "padded")})
    assert "scoring=padded (as recorded)" in capsys.readouterr().err
    assert replayed.logs == recorded.logs
    recorded = start({"record": str(tmp_path / "packed")})
    capsys.readouterr()
    replayed = start({"engine": None, "replay": str(tmp_path / "packed")})
    assert "scoring=packed (as recorded)" in capsys.readouterr().err
    assert max(difference(replayed, recorded)) < BOUND
