"""Runs that would change no weight of the policy, or not all that they are to train, end with the reason."""

import pytest
import torch
import trl
import trlx_hybrid
from peft import LoraConfig, PeftModel, get_peft_model
from trlx_hybrid.testing.models import tiny_model

ADAPTER = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An adapter as supervised training leaves it, in a folder."""
    folder = tmp_path_factory.mktemp("adapter")
    model = get_peft_model(tiny_model(), LoraConfig(**ADAPTER, init_lora_weights=False))
    model.save_pretrained(folder)
    return folder


def frozen(folder, **given):
    return PeftModel.from_pretrained(tiny_model(), folder, **given)


def disabled(folder):
    model = frozen(folder, is_trainable=True)
    model.base_model.disable_adapter_layers()
    return model


def merged(folder):
    model = frozen(folder, is_trainable=True)
    model.merge_adapter()
    return model


def of_another(folder):
    """A model in whose place another copy of it is stepped."""
    return tiny_model()


OTHER = r"or call `merge_and_unload\(\)` and give the trainer a `peft_config`"
IDLE = {
    "loaded for inference": (frozen, rf"adapter is frozen.*`is_trainable=True`, {OTHER}"),
    "disabled": (disabled, rf"layers of its adapter are disabled.*enable_adapter_layers.*{OTHER}"),
    "merged": (merged, rf"is merged into the base.*unmerge_adapter.*{OTHER}"),
    "unloaded": (
        lambda folder: frozen(folder).merge_and_unload(),
        r"weights are frozen.*`model.requires_grad_\(True\)`\), or give the trainer a `peft_config`",
    ),
    "all frozen": (lambda folder: tiny_model().requires_grad_(False), r"weights are frozen.*requires_grad_\(True\)"),
}


@pytest.mark.parametrize(
    ("case", "beta"),
    # of an adapter that is merged, TRL's reference takes it out
    [(case, beta) for case in IDLE for beta in (0.0, 0.1) if (case, beta) != ("merged", 0.1)],
)
def test_a_run_that_trains_nothing_is_refused_before_its_first_rollout(run, saved, tmp_path, case, beta):
    build, said = IDLE[case]
    model = build(saved)
    if not hasattr(model, "peft_config"):
        model.save_pretrained(tmp_path / "model")  # of which TRL makes the reference
        model.config._name_or_path = str(tmp_path / "model")
    started = run(trlx_hybrid.GRPOTrainer, model=model, beta=beta, use_vllm=True, train=False)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        started.trainer.train()
    assert started.recorder.prompts == []
    assert isinstance(raised.value, trlx_hybrid.errors.ConfigError)
    raised.match(f"would train nothing.*{said}")


def test_a_run_that_trains_nothing_is_refused_where_transformers_samples(run, saved):
    started = run(trlx_hybrid.GRPOTrainer, model=frozen(saved), beta=0.1, train=False)
    with pytest.raises(trlx_hybrid.errors.ConfigError, match=IDLE["loaded for inference"][1]):
        started.trainer.train()
    assert started.recorder.prompts == []


def test_an_optimizer_of_another_copy_of_the_model_is_refused_before_the_first_rollout(run):
    class Mistaken(trl.GRPOTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.AdamW(tiny_model().parameters(), lr=1e-3)
            return self.optimizer

    started = run(trlx_hybrid.hybrid(Mistaken), use_vllm=True, train=False)
    with pytest.raises(trlx_hybrid.errors.HybridError) as raised:
        started.trainer.train()
    assert started.recorder.prompts == []
    raised.match(r"AdamW\) holds none of the policy's 25 trainable parameters")


def test_frozen_weights_are_rolled_out_and_evaluated(run, saved, prompts):
    started = run(
        trlx_hybrid.GRPOTrainer,
        model=frozen(saved),
        use_vllm=True,
        eval_dataset=prompts.select(range(8)),
        train=False,
    )
    assert started.trainer.evaluate()["eval_reward"] > 0
    started.close()
    rolled = run(trlx_hybrid.GRPOTrainer, model=frozen(saved), hybrid={"engine": "vllm", "rollout_only": True})
    assert len(rolled.recorder.completions) == 24


def of_unknown_embeddings(**given):
    """A model for whose embeddings transformers and TRL cannot do what reentrant checkpointing needs."""
    model = tiny_model(**given)
    model.enable_input_require_grads = lambda: None
    return model


def test_layers_that_reentrant_checkpointing_keeps_gradients_from_are_named_at_the_first_step(run):
    model = of_unknown_embeddings(tied=False)
    model.get_input_embeddings().requires_grad_(False)
    all_layers = {"scoring": "padded"}  # packed rows keep the last layer's activations, whose weights get a gradient
    started = run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, train=False, hybrid=all_layers, **REENTRANT)
    with pytest.raises(trlx_hybrid.errors.SyncError) as raised:
        started.trainer.train()
    assert started.trainer.state.global_step == 0
    raised.match(r"22 of 24 trainable parameters got no gradient and never will: model\.layers\.0\..*use_reentrant")


def test_a_part_of_an_adapter_that_gets_no_gradient_is_named(run):
    config = LoraConfig(**ADAPTER, modules_to_save=["norm"])
    adapted = {"peft_config": config, "use_vllm": True, "train": False, "hybrid": {"scoring": "padded"}} | REENTRANT
    started = run(trlx_hybrid.GRPOTrainer, model=of_unknown_embeddings(), **adapted)
    with pytest.raises(trlx_hybrid.errors.SyncError, match=r"16 of 17 trainable parameters got no gradient.*lora_A"):
        started.trainer.train()
    started.close()
    healthy = run(trlx_hybrid.GRPOTrainer, **adapted | {"train": True})
    assert healthy.trainer.state.global_step == 3


@pytest.mark.parametrize(
    "given", [{"warmup_steps": 2, "max_steps": 2}, {"reward_funcs": lambda completions, **_: [1.0] * len(completions)}]
)
def test_a_warm_up_and_equal_rewards_train_nothing_and_are_no_error(run, saved, given):
    model = frozen(saved, is_trainable=True)
    run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, **{"max_steps": 1} | given)
