"""The reference of `beta > 0` where the policy is an adapter: a copy of what training starts from."""

import itertools

import pytest
import torch
import trl
import trlx_hybrid
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.trl.scoring.reference import parameters_apart

ADAPTER = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def lora(**given):
    return LoraConfig(**ADAPTER | {"init_lora_weights": False} | given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two adapters as supervised training leaves them, the first with its rank, in folders."""
    folders = []
    for seed, rank in enumerate((4, 2)):
        torch.manual_seed(seed)
        folders.append(tmp_path_factory.mktemp("adapter"))
        get_peft_model(tiny_model(), lora(r=rank)).save_pretrained(folders[-1])
    return folders


def loaded(saved, *names):
    model = PeftModel.from_pretrained(tiny_model(), saved[0], adapter_name=names[0], is_trainable=True)
    if len(names) > 1:
        model.load_adapter(saved[1], adapter_name=names[1], is_trainable=True)
    return model


def active(saved, names, which):
    model = loaded(saved, *names)
    model.base_model.set_adapter(which)
    return model


def adapting(**given):
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), lora(**given))


BUILDS = {
    "of another name": lambda saved: loaded(saved, "policy"),
    "two at once": lambda saved: active(saved, ("default", "other"), ["default", "other"]),
    "two of other names": lambda saved: active(saved, ("first", "second"), ["second", "first"]),
    "beside an idle default": lambda saved: active(saved, ("default", "other"), "other"),
    "of the embeddings": lambda saved: adapting(target_modules=["embed_tokens", "q_proj"]),
    "that writes to the base": lambda saved: adapting(init_lora_weights="pissa"),
}


def factors(model):
    """Each adapter's parameters by its name."""
    found = {}
    for name, p in model.named_parameters():
        for adapter in model.peft_config:
            if adapter in name.split("."):
                found.setdefault(adapter, []).append(p.detach().clone())
    return found


@pytest.mark.parametrize("case", BUILDS)
def test_a_policy_starts_as_its_reference_and_stays_active(run, saved, case):
    model = BUILDS[case](saved)
    names = list(model.active_adapters)
    before = factors(model)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    finished = run(trlx_hybrid.GRPOTrainer, model=model, beta=0.1, use_vllm=True, max_steps=2)
    after = factors(model)
    assert abs(finished.logs[0]["kl"]) < 1e-6
    assert finished.logs[1]["kl"] > 1e-6
    assert model.active_adapters == names
    for name, held in before.items():
        moved = any(bool((a != b).any()) for a, b in zip(held, after[name], strict=True))
        assert moved == (name in names), name
    for name, frozen in zip(names, ["ref", *(f"ref_of_{name}" for name in names[1:])], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before[name], after[frozen], strict=True))
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)


def test_rloo_leaves_two_adapters_active(run, saved):
    model = active(saved, ("default", "other"), ["default", "other"])
    before = factors(model)
    run(trlx_hybrid.RLOOTrainer, config_class=trl.RLOOConfig, model=model, beta=0.1, use_vllm=True, max_steps=2)
    after = factors(model)
    assert model.active_adapters == ["default", "other"]
    for name, frozen in (("default", "ref"), ("other", "ref_of_other")):
        assert not all(torch.equal(a, b) for a, b in zip(before[name], after[name], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before[name], after[frozen], strict=True))


RESUMED = {"the default": ("default",), "of another name": ("policy",), "two at once": ("default", "other")}


@pytest.mark.parametrize(("case", "beta"), [(case, 0.1) for case in RESUMED] + [("of another name", 0.0)])
def test_adapters_resume_as_they_were_saved(run, saved, prompts, tmp_path, case, beta):
    names = RESUMED[case]
    given = {"beta": beta, "use_vllm": True, "eval_dataset": prompts.select(range(8)), "eval_strategy": "steps"}
    given |= {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole = run(
        trlx_hybrid.GRPOTrainer, model=active(saved, names, list(names)), output_dir=str(tmp_path / "out"), **given
    )
    expected = whole.weights()
    whole.close()
    resumed = run(
        trlx_hybrid.GRPOTrainer,
        model=active(saved, names, list(names)),
        output_dir=str(tmp_path / "out"),
        resume=str(tmp_path / "out" / "checkpoint-1"),
        **given,
    )
    differing = [name for name, p in resumed.weights().items() if not torch.equal(p, expected[name])]
    assert differing == []
    assert resumed.trainer.model.active_adapters == list(names)


class WeightsAtStep1(TrainerCallback):
    """Copies the weights after the first step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", ["of another name", "two at once", "beside an idle default"])
def test_the_best_adapters_are_loaded_at_the_end(run, saved, prompts, case):
    first = WeightsAtStep1()
    calls = itertools.count()

    def worse_at_each_call(completions, **_):
        number = next(calls)
        return [sum(c.isdigit() for c in text) - 100.0 * number for text in completions]

    model = BUILDS[case](saved)
    names = list(model.active_adapters)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    given = {"eval_dataset": prompts.select(range(8)), "eval_strategy": "steps", "eval_steps": 1}
    given |= {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    given |= {"metric_for_best_model": "eval_reward", "greater_is_better": True}
    finished = run(
        trlx_hybrid.GRPOTrainer,
        model=model,
        use_vllm=True,
        max_steps=2,
        reward_funcs=worse_at_each_call,
        callbacks=[first],
        **given,
    )
    assert finished.trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert [name for name, p in finished.weights().items() if not torch.equal(p, first.weights[name])] == []
    assert model.active_adapters == names
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("start", ["pissa", False])
def test_a_reference_that_is_not_what_training_starts_from_is_refused_before_the_first_rollout(run, start):
    config = lora(init_lora_weights=start)
    started = run(trlx_hybrid.GRPOTrainer, peft_config=config, beta=0.1, use_vllm=True, train=False)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        started.trainer.train()
    assert started.recorder.prompts == []
    assert isinstance(raised.value, trlx_hybrid.errors.ConfigError)
    raised.match(r"reference of beta > 0 is another model .* nats a token.*get_peft_model\(model, peft_config\)")


@pytest.mark.parametrize("case", ["two of other names", "of the embeddings", "from zero"])
def test_parameters_tell_a_reference_from_another_model(run, saved, case):
    """As ZeRO-3 is looked at, where no pass may be made."""
    given = {"model": BUILDS[case](saved)} if case in BUILDS else {"peft_config": lora(init_lora_weights=True)}
    policy = run(trlx_hybrid.GRPOTrainer, **given, beta=0.1, use_vllm=True, train=False).trainer.session.policy
    assert not parameters_apart(policy)
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    trained[-1].data[-1, -1] += 1e-3
    assert parameters_apart(policy)


def test_token_rows_of_tied_embeddings_are_refused_before_the_first_rollout(run):
    config = LoraConfig(**ADAPTER, trainable_token_indices=[5, 20])
    with pytest.raises(trlx_hybrid.errors.ConfigError, match=r"trainable_token_indices.*tie_word_embeddings=False"):
        run(trlx_hybrid.GRPOTrainer, model=tiny_model(tie_word_embeddings=True), peft_config=config, use_vllm=True)


def test_an_adapter_that_has_the_references_name_is_refused(run, saved):
    with pytest.raises(trlx_hybrid.errors.ConfigError, match=r"adapter named 'ref'.*adapter_name="):
        run(trlx_hybrid.GRPOTrainer, model=loaded(saved, "ref"), beta=0.1, use_vllm=True)
