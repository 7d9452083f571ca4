"""Weights that change without a word to the engine are in it at the next rollout."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trlx_hybrid import HybridConfig, HybridEngine
from trlx_hybrid.contract.types import Sampling
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

LONG = list(range(20, 60))  # longer than a block, so that its prefix is cached


@pytest.fixture
def sampled_gap(started_once):
    """Returns, for a model, a function that samples once and says how far the engine is from the policy, in nats."""
    engines = []

    def start(model, weights, optimizer=None):
        config = HybridConfig(engine="vllm", weights=weights, engine_options={"max_model_len": 64, "max_num_seqs": 4})
        sampling = Sampling(max_tokens=8, logprobs=0, extra={"ignore_eos": True})
        engines.append(HybridEngine(model, character_tokenizer(), optimizer, config=config, sampling=sampling))

        def gap():
            with engines[-1].rollout_context():
                (completion,) = engines[-1].generate([LONG])
            ours = torch.tensor([position[0] for position in completion.logprobs])
            theirs = engines[-1].session.policy.log_probs(LONG, completion.token_ids)
            return float((ours - theirs).abs().max())

        return gap

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_a_loop_that_steps_outside_of_train_context_samples_from_what_it_trained(sampled_gap, kind):
    """B is 0 at first, so that the first step changes nothing but B."""
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.3, weight_decay=0.0, **kind)
    gap, ids, gaps = sampled_gap(model, "lora", optimizer), torch.tensor([LONG]), []
    for _ in range(3):
        gaps.append(gap())
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert max(gaps) < 1e-4


@pytest.mark.parametrize("weights", ["alias", "copy", "gather"])
def test_a_weight_that_is_written_to_between_two_rollouts_is_sampled_from(sampled_gap, weights):
    """Every weight in turn. With `alias` the engine has it at once, but not the keys and values of the prompt."""
    model = tiny_model()
    gap, gaps = sampled_gap(model, weights), {}
    gap()
    for name, p in model.named_parameters():
        if p.ndim > 1:
            p.data.add_(0.05 * torch.randn_like(p))
            gaps[name] = gap()
    assert {name: apart for name, apart in gaps.items() if not apart < 1e-4} == {}
