"""An SFT adapter that was loaded with `is_trainable=False`, and `beta > 0`."""

from peft import LoraConfig, PeftModel, get_peft_model
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.models import character_tokenizer, tiny_model

from .rig import apart, folder, loaded, logged, trained, weights

NUMBER = "Weights that three steps move, with an adapter loaded with `is_trainable=False` and `beta > 0`"
LORA = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")


def measure(library):
    with folder() as path:
        get_peft_model(tiny_model(), LORA).save_pretrained(path / "adapter")
        base = loaded(tiny_model(), character_tokenizer(), path / "base")
        model = PeftModel.from_pretrained(base, path / "adapter", is_trainable=False)
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        try:
            with trained(library, model, steps=3, beta=0.1) as trainer:
                norms = ", ".join(f"{norm:.2f}" for norm in logged(trainer, "grad_norm"))
                moved = sum(apart({name: before[name]}, weights(trainer)) > 0 for name in before)
                return f"{moved}; gradient norms in the log: {norms}"
        except ConfigError:
            return "none: an error before the first rollout"


def right(found):
    return found.startswith("none")
