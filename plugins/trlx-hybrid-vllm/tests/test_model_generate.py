"""`model.generate` inside of a rollout: transformers' arguments and results, the engine's tokens."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, MinLengthLogitsProcessor
from trlx_hybrid import HybridEngine
from trlx_hybrid.errors import ConfigError, EngineError
from trlx_hybrid.own_loop.model_generate import generate, served_generate
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

PROMPTS = [[5, 6, 7, 40], list(range(10, 23)), [90]]
WIDTH = 13
INPUT_IDS = torch.tensor([[0] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS])
MASK = (INPUT_IDS != 0).long()


@pytest.fixture(scope="module")
def engine(started_once):
    options = {"max_model_len": 64, "max_num_seqs": 16}
    with HybridEngine(tiny_model(), character_tokenizer(), engine_options=options) as engine:
        yield engine


def both(engine, **given):
    """What the model's own generate returns, and what the engine's does."""
    model = engine.session.policy.module
    own = model.generate(**given)
    with engine.rollout_context():
        return own, model.generate(**given)


def a_stop(engine):
    """A token that the first prompt's greedy completion has, and so ends with."""
    return int(both(engine, input_ids=INPUT_IDS, attention_mask=MASK, max_new_tokens=9)[0][0, WIDTH + 4])


# --- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "repetition_penalty": 1.4, "use_cache": False, "synced_gpus": False},
        {"max_length": WIDTH + 7, "num_beams": 1},
        {"max_new_tokens": 5, "do_sample": True, "top_k": 1},
        {"generation_config": GenerationConfig(max_new_tokens=6, repetition_penalty=2.0, pad_token_id=3)},
        {"max_new_tokens": 4, "do_sample": False} | dict.fromkeys(("temperature", "top_p", "top_k", "min_new_tokens")),
        {"max_new_tokens": 4, "min_new_tokens": 0, "logits_processor": LogitsProcessorList()},
    ],
    ids=["greedy", "repetition_penalty", "max_length", "top_k=1", "generation_config", "None", "nothing"],
)
@pytest.mark.parametrize("masked", [True, False], ids=["attention_mask", "pad tokens"])
def test_the_tokens_are_those_of_the_models_own_generate(engine, given, masked):
    mask = {"attention_mask": MASK} if masked or "generation_config" in given else {}  # whose pad token is another
    own, served = both(engine, input_ids=INPUT_IDS, **mask, **given)
    assert torch.equal(served, own)
    assert served.dtype == own.dtype


@pytest.mark.parametrize("several", [False, True])
def test_rows_that_stop_are_filled_with_the_pad_token(engine, several):
    stop = a_stop(engine)
    own, served = both(
        engine,
        input_ids=INPUT_IDS,
        attention_mask=MASK,
        max_new_tokens=12,
        eos_token_id=[stop, 1] if several else stop,
        pad_token_id=2,
    )
    assert torch.equal(served, own)
    assert (served[0, WIDTH:] == 2).any()
    assert (served[0, WIDTH:] == stop).sum() == 1


def test_without_a_stop_token_no_row_stops(engine):
    stop = a_stop(engine)
    config = engine.session.policy.base.generation_config
    before, config.eos_token_id = config.eos_token_id, stop
    try:
        own, served = both(engine, input_ids=INPUT_IDS[:1], attention_mask=MASK[:1], max_new_tokens=12)
        assert torch.equal(served, own)
        assert served.shape[1] < WIDTH + 12
        config.eos_token_id = None
        own, served = both(engine, input_ids=INPUT_IDS, attention_mask=MASK, max_new_tokens=12)
        assert torch.equal(served, own)
        assert served.shape == (3, WIDTH + 12)
    finally:
        config.eos_token_id = before


def test_the_engine_serves_what_was_trained_last(engine):
    model = engine.session.policy.module
    for _ in range(2):
        own, served = both(engine, inputs=INPUT_IDS, attention_mask=MASK, max_new_tokens=8)
        assert torch.equal(served, own)
        with engine.train_context(), torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)), alpha=0.02)
    assert not torch.equal(own, both(engine, inputs=INPUT_IDS, attention_mask=MASK, max_new_tokens=8)[0])


@torch.no_grad()
def test_samples_come_from_what_the_call_asks_for(engine):
    given = {"input_ids": INPUT_IDS, "attention_mask": MASK, "max_new_tokens": 6, "do_sample": True, "top_k": 3}
    with engine.rollout_context():
        model = engine.session.policy.module
        state = torch.random.get_rng_state()
        served, again = (model.generate(**given, num_return_sequences=4, temperature=2.0) for _ in range(2))
        assert torch.equal(torch.random.get_rng_state(), state)
    assert served.shape == (12, WIDTH + 6)
    assert torch.equal(served[:, :WIDTH], INPUT_IDS.repeat_interleave(4, dim=0))
    assert len({tuple(row) for row in torch.cat([served, again]).tolist()}) > 12  # groups and calls draw anew
    for row in served.tolist():
        ids = [token for token in row[:WIDTH] if token]
        for token in row[WIDTH:]:
            assert token in model(torch.tensor([ids])).logits[0, -1].topk(3).indices
            ids.append(token)
            if token == 1:
                break


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_beams": 2}, ConfigError, r"does not follow num_beams=2\. The engine takes max_new_tokens, max_length"),
        ({"return_dict_in_generate": True}, ConfigError, r"engine\.generate\(\) returns log-probs"),
        ({"output_scores": True}, ConfigError, "does not follow output_scores=True"),
        ({"stop_strings": ["a"]}, ConfigError, "does not follow stop_strings"),
        (
            {"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(3, 1)])},
            ConfigError,
            "logits_processor=.*outside of rollout_context",
        ),
        ({"temprature": 0.5}, ConfigError, r"temprature=0\.5\. Did you mean 'temperature'\?"),
        ({"num_return_sequences": 2}, ValueError, "Greedy methods"),  # transformers' own
        ({"max_new_tokens": None}, ConfigError, "was left no tokens: pass max_new_tokens"),
        ({"max_new_tokens": None, "max_length": 9}, ConfigError, "was left -4 tokens"),
        ({"max_new_tokens": 52}, EngineError, r"52 tokens after a prompt of 13; the engine's context holds 64"),
        ({"attention_mask": MASK.flip(1)}, ConfigError, "padded on the left"),
        ({"attention_mask": MASK[:, 1:]}, ConfigError, r"of the shape of input_ids, \(3, 13\)"),
        ({"input_ids": INPUT_IDS[0]}, ConfigError, r"input_ids of shape \(prompts, tokens\)"),
    ],
)
def test_what_the_engine_does_not_do_is_refused(engine, given, error, message):
    asked = {"input_ids": INPUT_IDS, "attention_mask": MASK, "max_new_tokens": 4} | given
    with engine.rollout_context(), pytest.raises(error, match=message):
        engine.session.policy.module.generate(**asked)


def test_the_engines_own_generate_needs_a_length(engine):
    with engine.rollout_context(), pytest.raises(ConfigError, match="made without max_tokens= and sampling="):
        engine.generate(PROMPTS)


# --- whose generate it is --------------------------------------------------------------------------------------------


def test_the_model_has_its_own_generate_before_and_after(engine):
    model, other = engine.session.policy.module, tiny_model()
    plain = type(model).generate

    def fails():
        assert model.generate.func is generate
        assert type(model).generate is other.generate.__func__ is plain
        raise ZeroDivisionError

    assert "generate" not in vars(model)
    with pytest.raises(ZeroDivisionError), engine.rollout_context():
        fails()
    assert "generate" not in vars(model)


def test_what_hid_the_models_generate_before_does_so_again(engine):
    model = engine.session.policy.module
    model.generate = "somebody else's"
    try:
        with engine.rollout_context():
            assert model.generate != "somebody else's"
        assert model.generate == "somebody else's"
    finally:
        del model.generate


def test_a_wrapper_serves_as_the_model_in_it(engine):
    model = tiny_model()
    wrapped = torch.compile(model)
    session = SimpleNamespace(policy=Policy(lambda: wrapped, None, torch.device("cpu")))
    with served_generate(session, wrapped):
        assert wrapped.generate.func is model.generate.func is generate
    assert "generate" not in vars(wrapped) | vars(model)
