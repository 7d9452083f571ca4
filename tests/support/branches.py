"""The branches of a row, by which tests compare log-probs with those of the model that saw a branch alone."""

import itertools

import pytest
import torch
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model

from tests.support.agents import TURNS


def branches_of(trajectory, of_version=None):
    """Token ids of each branch of a row with those before it, and the places of its sampled tokens among them. Their
    log-probs are compared with those of the model that saw the branch alone, with the weights that sampled each."""
    model, tokenizer = chatty_model(chat_tokenizer(TURNS), TURNS).eval(), chat_tokenizer(TURNS)
    ids, begins = trajectory.completion_ids, tokenizer.convert_tokens_to_ids("<|im_start|>")
    pairs = itertools.pairwise(ids)  # between the turns of one branch there is a line break
    starts = [0, *(at for at, pair in enumerate(pairs, 1) if pair == (tokenizer.eos_token_id, begins))]
    versions = trajectory.weight_versions or [None] * len(ids)
    found = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        context = [] if number else trajectory.prompt_ids
        branch = [*context, *ids[start:end]]
        sampled = [at for at in range(start, end) if trajectory.loss_mask[at]]
        for version in {versions[at] for at in sampled}:
            if version is not None:
                model.load_state_dict(of_version[version])
            with torch.no_grad():
                scored = model(torch.tensor([branch])).logits[0].log_softmax(-1)
            for at in sampled:
                if versions[at] == version:
                    wanted = scored[len(context) + at - start - 1, ids[at]].item()
                    assert trajectory.logprobs[at] == pytest.approx(wanted, abs=1e-5)
        found.append((branch, [len(context) + at - start for at in sampled]))
    return found
