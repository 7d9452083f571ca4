"""QLoRA: a base that bitsandbytes holds in 4 bits, and an adapter beside it."""

import pytest
import torch
import trlx_hybrid
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from trlx_hybrid import hookimpl
from trlx_hybrid.errors import ComponentError
from trlx_hybrid.memory.ledger import parameter_sizes
from trlx_hybrid.policy import quantised
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

from tests.support.agreement import gap

pytest.importorskip("bitsandbytes")
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": "gaussian"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model as users have it: on disk."""
    path = str(tmp_path_factory.mktemp("model"))
    tiny_model().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


def loaded(folder, nested=False, dtype=torch.float32, **settings):
    settings = settings or {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": nested}
    quantization = BitsAndBytesConfig(**settings, bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=dtype)


class Syncs:
    def __init__(self):
        self.seen = []

    @hookimpl
    def trlx_sync_end(self, session, report):
        base = session.live_engine.differing(session.policy.full_weights(merge=False))
        self.seen.append((report.weights, report.bytes, base))


class EveryStep(TrainerCallback):
    def __init__(self):
        self.gaps = []

    def on_step_end(self, *args, **kwargs):
        self.gaps.append(gap(self.session))


@pytest.mark.parametrize("sleep", [False, True], ids=["awake", "sleep"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_the_engine_serves_the_values_of_the_base_and_the_adapter(run, folder, nested, sleep):
    callback, syncs = EveryStep(), Syncs()
    finished = run(
        trlx_hybrid.GRPOTrainer,
        model=loaded(folder, nested),
        peft_config=LoraConfig(**ADAPTER),
        callbacks=[callback],
        plugins=[syncs],
        use_vllm=True,
        vllm_enable_sleep_mode=sleep,
        train=False,
    )
    trainer = finished.trainer
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()  # TRL has them in bfloat16, whose rounding is more than what is looked for
    before = [p.detach().clone() for p in trained]
    callback.session = trainer.session
    trainer.train()
    assert {weights for weights, *_ in syncs.seen} == {"lora"}
    assert all(differing == [] for *_, differing in syncs.seen)
    adapter = sum(p.nbytes for p in trained)
    assert syncs.seen[-1][1] == adapter if not sleep else syncs.seen[-1][1] > 2 * adapter  # the base as well
    assert max(callback.gaps) < 1e-5
    assert all(not torch.equal(p, old) for p, old in zip(trained, before, strict=True))
    assert trainer.session.policy.dtype is torch.float32


def test_a_script_of_trls_trains_with_one_argument(run, folder):
    finished = run(
        trlx_hybrid.GRPOTrainer,
        model=folder,
        train=False,
        use_vllm=True,
        peft_config=LoraConfig(**ADAPTER),
        model_init_kwargs={
            "dtype": "bfloat16",
            "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        },
    )
    trainer = finished.trainer
    trainer.train()
    assert trainer.session.weights.name == "lora"
    assert trainer.session.live_engine.dtype is torch.bfloat16
    assert all(log["grad_norm"] > 0 for log in trainer.state.log_history if "loss" in log)


def test_a_checkpoint_that_is_in_4_bits_already_is_served(run, folder, tmp_path):
    loaded(folder, nested=True).save_pretrained(tmp_path / "bits")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bits", dtype=torch.float32)
    assert quantised.in_4_bits(model.model.layers[0].mlp.down_proj.weight)
    syncs = Syncs()
    finished = run(
        trlx_hybrid.GRPOTrainer, model=model, peft_config=LoraConfig(**ADAPTER), plugins=[syncs], use_vllm=True
    )
    assert [(weights, differing) for weights, _, differing in syncs.seen] == [("lora", [])] * 3
    finished.trainer.save_model(str(tmp_path / "saved"))


def test_values_are_those_that_the_layers_multiply_by(folder):
    model = loaded(folder, nested=True)
    quantised.keep_bits(model.modules())
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, layer.in_features)
    assert quantised.in_4_bits(layer.weight)
    expected = torch.nn.functional.linear(x, quantised.values(layer.weight).float())
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-6)  # bitsandbytes' own kernel where nothing is trained
    x.requires_grad_()
    assert torch.equal(layer(x), expected)


def test_the_memory_of_the_base_is_that_of_its_bits_and_scales(folder):
    model = loaded(folder)
    layer = model.model.layers[0].mlp.down_proj
    elements = layer.in_features * layer.out_features
    assert quantised.elements(layer.weight) == elements
    held = sum(p.bytes for p in parameter_sizes(torch.nn.ModuleList([layer])))
    assert held == elements // 2 + -(-elements // 64) * 4


def test_an_adapter_that_would_have_to_be_merged_into_4_bits_is_refused_before_an_engine_is_built(
    run, folder, monkeypatch
):
    import vllm

    monkeypatch.setattr(vllm, "LLM", lambda **_: pytest.fail("an engine was built"))
    adapter = LoraConfig(**ADAPTER | {"use_dora": True, "init_lora_weights": True})
    with pytest.raises(ComponentError, match=r"held in 4 bits.*weights='lora'.*use_dora: DoRA"):
        run(trlx_hybrid.GRPOTrainer, model=loaded(folder), use_vllm=True, peft_config=adapter)


def test_a_base_in_8_bits_is_refused_with_the_reason(run, folder, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "LLM", lambda **_: pytest.fail("an engine was built"))
    model = loaded(folder, load_in_8bit=True)
    with pytest.raises(ComponentError, match=r"held in 8 bits, by layers that round what goes in too.*load_in_4bit"):
        run(trlx_hybrid.GRPOTrainer, model=model, use_vllm=True, peft_config=LoraConfig(**ADAPTER))
