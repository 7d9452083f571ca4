"""The ids that tokens were sampled from: kept in few words, cut and joined, and what is scored over them."""

import numpy as np
import pytest
import torch
import trl.trainer.utils
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.contract.conversation import Conversation
from trlx_hybrid.contract.support import KeptTokens, Support, mask_words, tensors_of, words_of, words_of_ids
from trlx_hybrid.contract.types import Completion, Sampling
from trlx_hybrid.errors import ComponentError, ConfigError
from trlx_hybrid.rollout.turns import Supports
from trlx_hybrid.trl.scoring import kept_ids, kept_log_probs
from trlx_hybrid.trl.scoring.kept_log_probs import KeptLogProbs, Projection, scoring_over


@st.composite
def masks(draw):
    """(tokens, vocabulary) bool, with at least one id for each token."""
    vocabulary, seed = draw(st.integers(1, 200)), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    number = draw(st.integers(1, 6))
    kept = generator.random((number, vocabulary)) < generator.choice([0.01, 0.1, 0.5, 0.99, 1.0], (number, 1))
    kept[np.arange(number), generator.integers(0, vocabulary, number)] = True
    return kept


def support_of(kept):
    return Support.of([words_of(row) for row in kept], kept.shape[1])


def ids_of(support):
    return [None if (ids := support.ids(i)) is None else ids.tolist() for i in range(len(support))]


def listed(kept):
    return [np.flatnonzero(row).tolist() for row in kept]


@given(masks())
def test_words_stand_for_the_ids_and_are_no_more_than_a_mask_has(kept):
    support = support_of(kept)
    assert ids_of(support) == listed(kept)
    assert [words_of_ids(np.flatnonzero(row), len(row)).tolist() for row in kept] == [
        words_of(r).tolist() for r in kept
    ]
    assert (np.diff(support.bounds, axis=1) <= mask_words(kept.shape[1])).all()
    assert support.nbytes == 4 * len(support.words) + 16 * len(kept)


def test_a_top_50_of_a_large_vocabulary_takes_200_bytes_a_token():
    words = words_of_ids(np.arange(1000, 1050), 151_936)
    assert words.nbytes == 200
    assert words_of_ids(np.arange(5000), 151_936).nbytes == 4 * mask_words(151_936) == 18_992
    assert words_of_ids(np.arange(1, 151_936), 151_936).tolist() == [~0]  # all but one
    assert words_of_ids(np.arange(151_936), 151_936).nbytes == 0


@given(masks(), st.integers(0, 6), st.integers(0, 6), st.integers(0, 3))
def test_parts_are_what_the_whole_is(kept, start, end, observed):
    support, cut = support_of(kept), slice(start, max(start, end))
    assert ids_of(support[cut]) == listed(kept)[cut]
    joined = support[cut] + Support.unsampled(observed, kept.shape[1]) + support
    assert ids_of(joined) == [*listed(kept)[cut], *[None] * observed, *listed(kept)]
    assert joined.sampled.tolist() == [True] * len(listed(kept)[cut]) + [False] * observed + [True] * len(kept)
    assert ids_of(joined[len(joined) - len(kept) :]) == listed(kept)


def bits(masks, vocabulary):
    return kept_log_probs._columns(masks, 0, vocabulary).numpy()


@given(masks(), st.integers(1, 3), st.integers(0, 2))
def test_masks_of_rows_in_a_batch_are_those_of_their_tokens(kept, prompt, more):
    vocabulary, tokens = kept.shape[1], len(kept)
    supports = [support_of(kept), support_of(kept[::-1])[: tokens - 1]]
    tensors = tensors_of(supports, tokens + more)
    rows = KeptTokens.of(tensors, prompt, vocabulary)
    found = bits(rows.masks(), vocabulary).reshape(2, prompt + tokens + more, vocabulary)
    assert (found[0, prompt - 1 : prompt - 1 + tokens] == kept).all()
    assert (found[1, prompt - 1 : prompt - 2 + tokens] == kept[::-1][: tokens - 1]).all()
    assert found[:, : prompt - 1].all()
    assert found[0, prompt - 1 + tokens :].all()
    swapped = KeptTokens.of({name: tensor[[1, 0]] for name, tensor in tensors.items()}, prompt, vocabulary)
    assert (bits(swapped.masks(), vocabulary).reshape(found.shape) == found[[1, 0]]).all()
    places = torch.arange(2 * (prompt + tokens + more)).flip(0)
    assert (bits(rows.at(places).masks(), vocabulary) == found.reshape(-1, vocabulary)[::-1]).all()
    assert (bits(rows.repeated(2)[1:3].masks(), vocabulary).reshape(found.shape) == found).all()


@pytest.mark.parametrize("softcap", [None, 3.0])
@given(kept=masks())
def test_log_probs_entropies_and_gradients_are_those_of_dense_logits(kept, softcap):
    tokens, vocabulary = kept.shape
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(*shape, generator=generator).double() for shape in ((tokens, 8), (vocabulary, 8), (vocabulary,))
    ]
    weights = torch.randn(2, tokens, generator=generator)
    wanted = torch.tensor([int(np.flatnonzero(row)[-1]) for row in kept])
    inside = torch.from_numpy(kept)

    hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in exact)
    logits = (hidden @ weight.t() + bias) * 0.7
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.8
    truth = logits.masked_fill(~inside, -torch.inf).log_softmax(1)
    entropies = -(truth.exp() * truth.masked_fill(~inside, 0)).sum(1)
    shares = logits.masked_fill(~inside, -torch.inf).logsumexp(1) - logits.logsumexp(1)
    found = truth.gather(1, wanted[:, None])[:, 0]
    gradients = torch.autograd.grad((found * weights[0] + entropies * weights[1]).sum(), (hidden, weight, bias))

    support = support_of(kept)
    rows = KeptTokens(torch.from_numpy(support.words), torch.from_numpy(support.bounds), vocabulary)
    hidden, weight, bias = (tensor.float().requires_grad_() for tensor in exact)
    patched = pytest.MonkeyPatch()
    patched.setattr(kept_log_probs, "TOKENS", 3)
    with patched.context():
        scores = KeptLogProbs.apply(hidden, weight, bias, wanted, rows, Projection(64, 1 / 0.8, softcap, 0.7))
        own = torch.autograd.grad((scores[0] * weights[0] + scores[1] * weights[1]).sum(), (hidden, weight, bias))
    patched.undo()
    for ours, theirs in zip((*scores, *own), (found, entropies, shares, *gradients), strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-4, atol=1e-4)


def test_a_token_outside_of_its_support_has_no_probability():
    rows = KeptTokens(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([[0, 2]]), 100)
    scores = KeptLogProbs.apply(
        torch.ones(1, 2), torch.ones(100, 2), None, torch.tensor([7]), rows, Projection(64, 1, None, 1)
    )
    assert scores[0].item() == -torch.inf


def test_a_model_that_scores_other_positions_is_told():
    rows = KeptTokens(torch.zeros(0, dtype=torch.int32), torch.full((4, 2), -1), 100)
    over = scoring_over(rows, torch.ones(4, dtype=torch.bool), [], trl.trainer.utils)
    with pytest.raises(ComponentError, match="scored 0 tokens, and the support of 4 is known"), over:
        pass


# --- rows of a rollout ------------------------------------------------------------------------------------------------


def top(*tokens, vocabulary=100):
    """A support that keeps each token and the one after it."""
    return Support.of([np.array([token, token + 1], np.int32) for token in tokens], vocabulary)


def test_a_row_is_put_together_from_its_turns_and_cut_where_it_was_cut():
    supports = Supports()
    supports.add([1, 2], [10, 11], top(10, 11))
    supports.add([1, 2], [10], top(10))
    supports.add([1, 2, 10, 11, 5, 6], [20, 21, 22], top(20, 21, 22))
    row = supports.of_row([1, 2], [10, 11, 5, 6, 20, 21], [1, 1, 0, 0, 1, 1])
    assert ids_of(row) == [[10, 11], [11, 12], None, None, [20, 21], [21, 22]]
    assert ids_of(supports.of_row([1, 2], [10], None)) == [[10, 11]]
    assert supports.of_row([1, 2], [10, 11, 12], None) is None  # nobody has sampled the last
    assert supports.of_row([1, 3], [10], None) is None
    assert ids_of(supports.of_row([1, 3], [10], [0])) == [None]
    supports.clear()
    assert supports.of_row([1, 2], [10], None) is None


def test_a_support_of_other_tokens_is_refused():
    with pytest.raises(ComponentError, match="A completion of 3 tokens came with the support of 2"):
        Supports().add([1], [10, 11, 12], top(10, 11))


def test_a_conversation_has_the_support_of_what_was_sampled():
    conversation = Conversation()
    conversation.sampled(Completion(token_ids=[10], support=top(10)))
    conversation.observed([5, 6])
    conversation.sampled(Completion(token_ids=[20], support=top(20)))
    assert ids_of(conversation.support) == [[10, 11], None, None, [20, 21]]
    conversation.sampled(Completion(token_ids=[30]))  # of which nobody says it
    assert conversation.support.sampled.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"top_k": 20}, "top_k=20"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"regex": "a*"}, "regex='a*'"),
        ({"extra": {"min_tokens": 4}}, "min_tokens=4"),
        ({"extra": {"bad_words": ["x"]}}, "bad_words=['x']"),
        ({"extra": {"logit_bias": {5: -100.0}}}, "logit_bias={5: -100.0}"),
        ({"extra": {"logit_bias": {5: 1.0}}}, None),
        ({"repetition_penalty": 1.2}, None),
        ({"top_k": -1, "extra": {"temperature": 0.5, "stop": ["x"], "min_tokens": 0}}, None),
    ],
    ids=str,
)
def test_settings_that_leave_ids_out_are_known(setting, name):
    sampling = Sampling(max_tokens=8, **setting)
    assert sampling.truncated_by() == name
    if name is not None:
        assert sampling.reshaped_by(1.0) == name
        assert sampling.reshaped_by(1.0, over_support=True) is None


def test_what_a_rollout_takes_is_told_and_too_much_is_refused():
    long = Sampling(max_tokens=8192, top_k=50)
    assert "200 bytes a token at most, 0.098 GiB a rollout" in kept_ids.forecast(long, 64, 151_936)
    assert "18992 bytes a token at most, in" in kept_ids.forecast(Sampling(max_tokens=8192, top_p=0.9), 64, 151_936)
    with pytest.raises(ConfigError, match=r"top_k=4000 keeps take 31.2 GiB .* Set a lower top_k"):
        kept_ids.forecast(Sampling(max_tokens=8192, top_k=4000), 256, 151_936)
