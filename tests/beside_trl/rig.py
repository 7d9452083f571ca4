"""A small run with the trainer of TRL or with that of trlx_hybrid: the same arguments and the same random weights."""

import contextlib
import os
import tempfile
from pathlib import Path

import trl
import trlx_hybrid
from peft import PeftModel
from transformers import AutoModelForCausalLM, PrinterCallback
from trlx_hybrid.testing.models import character_tokenizer, sorting_prompts, tiny_grpo, tiny_model
from trlx_hybrid.testing.processes import free_port
from trlx_hybrid_vllm.private.ending import shut_down

from tests.support.stock_colocate import plain_colocate

TRAINERS = {"trl": trl.GRPOTrainer, "trlx_hybrid": trlx_hybrid.GRPOTrainer}
OWN = ("processing_class", "train_dataset", "reward_funcs", "tools")


def digits(completions, **columns):
    """A reward that differs between completions."""
    return [sum(character.isdigit() for character in text) + len(text) / 100 for text in map(str, completions)]


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@contextlib.contextmanager
def trained(library, model=None, resume=None, steps=1, **given):
    """Train, and yield the trainer; its engine is closed afterwards. Without `steps`, it is made and not trained."""
    environment = dict(os.environ)
    arguments = {"processing_class": character_tokenizer(), "train_dataset": sorting_prompts(), "reward_funcs": digits}
    arguments |= {name: given.pop(name) for name in OWN if name in given}
    with folder() as temporary, plain_colocate():
        os.environ["MASTER_PORT"] = str(free_port())
        settings = {"max_steps": steps or 1, "learning_rate": 3e-3} | given
        config = trl.GRPOConfig(**tiny_grpo(settings.pop("output_dir", temporary / "run"), **settings))
        model = loaded(model or tiny_model(), arguments["processing_class"], temporary / "model")
        trainer = TRAINERS[library](model=model, args=config, **arguments)
        trainer.remove_callback(PrinterCallback)
        try:
            if steps:
                trainer.train(resume_from_checkpoint=resume)
            yield trainer
        finally:
            close(trainer)
            os.environ.clear()  # TRL sets RANK and its like, and leaves them
            os.environ.update(environment)


def loaded(model, tokenizer, path):
    """The model, loaded from a folder, where TRL's engine loads its own from."""
    if isinstance(model, PeftModel):
        return model  # its base was
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=model.dtype)


def close(trainer):
    if hasattr(trainer, "session"):
        trainer.session.close()
    elif getattr(trainer, "vllm_generation", None) is not None:
        shut_down(trainer.vllm_generation.llm, made_default_group=True)


def logged(trainer, name):
    """The values of a number in the log, by step."""
    return [log[name] for log in trainer.state.log_history if name in log]


def weights(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}


def apart(some, others):
    """How far the two differ at most."""
    return max(float((some[name] - others[name]).abs().max()) for name in some)
