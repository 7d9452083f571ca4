"""What stops a run: tokens that engine and trainer score apart, and a first step that trained nothing."""

import re
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from transformers import Adafactor
from transformers.integrations.neftune import activate_neftune
from trlx_hybrid.config import HybridConfig
from trlx_hybrid.contract.types import Completion, Sampling
from trlx_hybrid.errors import ConfigError, PolicyError, SyncError
from trlx_hybrid.policy.first_step import FirstStep
from trlx_hybrid.policy.policy import Policy
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.weights.sync import WeightVersions
from trlx_hybrid.weights.verify import allowed_gap, check_log_probs, disagreement, noise

ALONE = SimpleNamespace(any=bool, gather=lambda value: [value])


def batch(rows=4, tokens=100):
    scored = -torch.rand(rows, tokens) * 3
    ids = torch.arange(rows * tokens).view(rows, tokens)
    return scored.clone(), scored, torch.ones_like(ids), ids


def allowed(dtype=torch.float32, policy_dtype=torch.float32, autocast=torch.float32, experts=False, nats=None):
    engine = SimpleNamespace(dtype=dtype, quantized=False)
    return allowed_gap(engine, SimpleNamespace(dtypes=[policy_dtype], has_experts=experts), autocast, nats)


def test_the_first_token_that_differs_is_named():
    sampled, scored, mask, ids = batch()
    assert disagreement(sampled, scored, mask, ids, allowed()) is None
    sampled[2, 7] -= 0.25
    sampled[3, 1] += 0.25
    told = disagreement(sampled, scored, mask, ids, allowed())
    assert told.startswith("token 7 of completion 2 (id 207) was sampled at a log-prob of")
    assert "2 of 400 tokens are more than 0.001 nats apart" in told
    assert disagreement(sampled, scored, mask, ids, allowed(nats=0.3)) is None


def test_observed_and_padded_tokens_do_not_count_and_a_nan_does():
    sampled, scored, mask, ids = batch()
    sampled[0, 50:] = 0.0
    mask[0, 50:] = 0
    assert disagreement(sampled, scored, mask, ids, allowed()) is None
    sampled[1, 3] = float("nan")
    assert disagreement(sampled, scored, mask, ids, allowed()).startswith("token 3 of completion 1")


@pytest.mark.parametrize(("weights", "said"), [(float("nan"), r"in lm_head\.weight\. An optim"), (1.0, "overflows")])
def test_a_policy_that_gives_no_numbers_is_blamed_itself_whatever_is_compared(weights, said):
    model, (sampled, scored, mask, ids) = tiny_model(tie_word_embeddings=False), batch()
    model.lm_head.weight.data[0, 0] = weights
    sampled[1, 3:] = scored[1, 3:] = float("nan")
    mask[1, 50:] = 0
    policy = Policy(lambda: model, None, torch.device("cpu"))
    given = {"engine": None, "sampling": None, "autocast": torch.float32, "call": None}
    versions = WeightVersions(policy, ALONE, None, HybridConfig(max_logprob_gap=float("inf")), **given)
    rest = {"temperature": 1.0, "step": 7, "own_sampler": True}
    told = rf"At step 7, .* 47 of 350 tokens, from token 3 of completion 1 on\. .*{said}"
    with pytest.raises(PolicyError, match=told):
        versions.check_batch(None, sampled, scored, mask, ids, **rest)
    mask[1] = 0
    versions.check_batch(None, sampled, scored, mask, ids, **rest)


def test_a_probe_that_the_policy_scores_as_no_numbers_is_not_the_syncs_fault():
    model = tiny_model()
    model.get_input_embeddings().weight.data[:] = float("nan")
    sampled = Completion(token_ids=[3], logprobs=[[float("nan")]], logprob_token_ids=[[3]])
    with pytest.raises(PolicyError, match="a probe sequence are no numbers"):
        check_log_probs(None, Policy(lambda: model, None, torch.device("cpu")), [1], sampled, 1e-3)


def test_in_16_bits_and_with_experts_a_share_of_the_tokens_may_differ():
    sampled, scored, mask, ids = batch(rows=10)
    coarse, routed = allowed(torch.bfloat16), allowed(torch.bfloat16, experts=True)
    sampled[:, 0] += 2.0  # 10 of 1,000
    assert disagreement(sampled, scored, mask, ids, coarse) is None
    sampled[0, 1] += 2.0
    assert "11 of 1000 tokens are more than 0.5 nats apart, and at most 1% may be" in disagreement(
        sampled, scored, mask, ids, coarse
    )
    assert disagreement(sampled, scored, mask, ids, routed) is None
    assert disagreement(sampled, scored, mask, ids, allowed(experts=True)) is None
    few = [t[:1, :8] for t in batch()]
    few[0][0, :3] += 2.0
    assert disagreement(*few, coarse) is None  # three improbable tokens of eight happen
    few[0][0, 3] += 2.0
    assert disagreement(*few, coarse) is not None


def test_the_coarsest_arithmetic_decides():
    assert allowed()[0] == 1e-3
    assert allowed(torch.float16)[0] == 0.1
    assert allowed(autocast=torch.bfloat16)[0] == 0.5
    assert allowed(torch.float16, policy_dtype=torch.bfloat16)[0] == 0.5
    assert allowed(torch.bfloat16, nats=0.05)[0] == 0.05


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(ConfigError, match="max_logprob_gap must be more than 0"):
        HybridConfig(max_logprob_gap=bound)


def test_settings_that_reshape_the_distribution_are_known():
    plain = {"max_tokens": 8, "temperature": 0.7}
    assert Sampling(**plain, extra={"stop": ["x"], "temperature": 0.7}).reshaped_by(0.7) is None
    assert Sampling(**plain, top_k=-1).reshaped_by(0.7) is None
    assert Sampling(**plain, top_p=0.9).reshaped_by(0.7) == "top_p=0.9"
    assert Sampling(**plain, regex="a*").reshaped_by(0.7) == "regex='a*'"
    for name, value in {"temperature": 1.0, "min_tokens": 4, "logit_bias": {5: 1.0}, "top_k": 20}.items():
        assert Sampling(**plain, extra={name: value}).reshaped_by(0.7) == f"{name}={value!r}"
    assert Sampling(max_tokens=8, temperature=0.0).reshaped_by(0.0) == "temperature=0.0"


def test_a_policy_with_dropout_is_random_while_it_trains():
    model = tiny_model()
    model.train()
    assert noise(model) is None
    model.model.layers[1].self_attn.attention_dropout = 0.1
    assert noise(model) == "model.layers.1.self_attn.attention_dropout=0.1"
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.2))
    assert noise(model) == "model.layers.0.mlp.1.p=0.2"
    activate_neftune(model, 5)
    assert noise(model) == "model.embed_tokens.neftune_noise_alpha=5"
    model.eval()
    assert noise(model) is None


DRAWS = {
    "LoKr": (peft.LoKrConfig, {"r": 2, "rank_dropout": 0.5}, r"q_proj\.rank_dropout=0\.5"),
    "LoHa": (peft.LoHaConfig, {"r": 2, "module_dropout": 0.5}, r"q_proj\.module_dropout=0\.5"),
    "OFT": (peft.OFTConfig, {"oft_block_size": 4, "module_dropout": 0.5}, r"oft_dropout\.default\.p=0\.5"),
    "PVeRA": (peft.PveraConfig, {"r": 2}, r"q_proj \(peft\.tuners\.pvera"),
    "MonteCLoRA": (
        peft.LoraConfig,
        {"r": 2, "monteclora_config": peft.MontecloraConfig()},
        r"\(peft\.tuners\.lora\.monteclora",
    ),
    "LoKr without": (peft.LoKrConfig, {"r": 2}, None),
}


def test_a_users_dropout_of_another_name_is_one():
    class Thinned(nn.Dropout): ...

    assert noise(nn.Sequential(Thinned(0.3))) == "0.p=0.3"


@pytest.mark.parametrize("adapter", DRAWS)
def test_an_adapter_that_draws_is_random_while_it_trains(adapter):
    config, given, found = DRAWS[adapter]
    model = peft.get_peft_model(tiny_model(), config(target_modules=["q_proj"], **given))
    model.train()
    assert noise(model) is None if found is None else re.search(found, noise(model))
    model.eval()
    assert noise(model) is None


def step(model, lr=1e-2, gradient=1.0, of=None, ranks=ALONE):
    """One step, as the trainer's callbacks see it, of an optimizer that was made for `of`."""
    first = FirstStep(Policy(lambda: model, None, torch.device("cpu")), ranks)
    optimizer = torch.optim.SGD(of or list(model.parameters()), lr=lr)
    first.begins(optimizer)
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient)
    optimizer.step()
    first.ended(0, optimizer)


def test_a_first_step_that_changes_something_passes_and_one_that_must_and_does_not_stops_the_run():
    step(tiny_model())
    with pytest.raises(SyncError, match="Step 1 of the optimizer changed no bit of any trainable weight"):
        step(tiny_model(), of=[nn.Parameter(torch.ones(1))])
    model = tiny_model(dtype=torch.bfloat16)
    for p in model.parameters():
        nn.init.ones_(p)
    with pytest.raises(SyncError, match="bfloat16 round updates away"):
        step(model, lr=1e-6)


def test_a_trainable_layer_that_a_batch_does_not_use_is_told_and_no_error(caplog):
    model = tiny_model()
    model.spare = nn.Linear(2, 2)
    first = FirstStep(Policy(lambda: model, None, torch.device("cpu")), SimpleNamespace(**vars(ALONE), rank=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for number in range(2):
        first.begins(optimizer)
        model(torch.ones(1, 4, dtype=torch.long)).logits.pow(2).sum().backward()
        optimizer.step()
        first.ended(number, optimizer)
    assert caplog.text.count("2 of 27 trainable parameters got no gradient: spare.weight, spare.bias") == 1


def test_ranks_that_train_on_their_own_are_noticed_at_the_first_step():
    others = SimpleNamespace(rank=0, world=2, any=bool, gather=lambda digest: [digest, digest + 1])
    with pytest.raises(SyncError, match="After step 1 of the optimizer the ranks hold different weights"):
        step(tiny_model(), ranks=others)


def test_the_probe_after_a_sync_is_held_to_the_coarsest_arithmetic_too():
    sampled = Completion(token_ids=[3], logprobs=[[-1.0]], logprob_token_ids=[[3]])
    parts = {"dtype": torch.float32, "dtypes": [torch.float32], "quantized": False, "has_experts": False}
    part = SimpleNamespace(**parts, wake=lambda what: None, log_probs=lambda prompt, ids: torch.tensor([-1.05]))
    component = SimpleNamespace(completions=lambda completions, requests, sampling: completions)
    part.base = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=9)))
    part.generate, part.max_model_len = lambda requests, sampling: [sampled], 64
    memory = SimpleNamespace(make_room=lambda owners: 0)

    def versions(autocast):
        given = {"engine": component, "sampling": None, "autocast": autocast, "call": None}
        return WeightVersions(part, ALONE, memory, HybridConfig(), **given)

    assert versions(torch.bfloat16)._check_log_probs(part) == pytest.approx(0.05)
    with pytest.raises(SyncError, match=r"disagree by 0\.05 nats"):
        versions(torch.float32)._check_log_probs(part)


@pytest.mark.parametrize(
    ("ours", "said"), [([-1.0, -2.0, -3.0], "agree when moved by one token"), ([-9.0] * 3, "Report it")]
)
def test_log_probs_of_the_next_token_are_told_from_other_ones(ours, said):
    theirs = torch.tensor([-0.5, -1.0, -2.0])
    policy = SimpleNamespace(log_probs=lambda prompt, ids: theirs)
    policy.base = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace()))
    sampled = Completion(token_ids=[3, 4, 5], logprobs=[[each] for each in ours], logprob_token_ids=[[3], [4], [5]])
    with pytest.raises(SyncError, match=said):
        check_log_probs(None, policy, [1], sampled, 1e-5)


@pytest.mark.parametrize("given", [{"lr": 0.0}, {"gradient": 0.0}, {"gradient": 1e-12}])
def test_a_first_step_that_had_nothing_to_change_is_passed_over(given):
    step(tiny_model(), **given)


def test_an_optimizer_that_makes_its_own_learning_rate_is_passed_over():
    model = tiny_model()
    first = FirstStep(Policy(lambda: model, None, torch.device("cpu")), ALONE)
    optimizer = Adafactor(model.parameters(), lr=None)
    first.begins(optimizer)
    first.ended(0, optimizer)
