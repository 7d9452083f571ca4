"""Run by tests/test_replay.py: a replay where neither vLLM nor Ray is to be found; logs and weights go to a folder."""

import importlib.util
import json
import sys
from pathlib import Path

HIDDEN = ("vllm", "ray")
find_spec = importlib.util.find_spec


class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def refuse(*args, **kwargs):
    raise AssertionError("a reward function was called")


def main(out: Path) -> None:
    from datasets import Dataset
    from safetensors.torch import save_file
    from trl import GRPOConfig
    from trlx_hybrid import GRPOTrainer, HybridConfig, TrlParser
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    (hybrid,) = TrlParser((HybridConfig,)).parse_args_and_config()
    config = GRPOConfig(
        output_dir=str(out / "run"),
        num_generations=4,
        num_iterations=2,
        max_completion_length=12,
        max_steps=4,
        logging_steps=1,
        learning_rate=3e-3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        vllm_max_model_length=64,
    )
    trainer = GRPOTrainer(
        model=tiny_model(),
        args=config,
        reward_funcs=refuse,
        train_dataset=Dataset.from_dict({"prompt": [f"sort {i}=" for i in range(32)]}),
        processing_class=character_tokenizer(),
        hybrid=hybrid,
    )
    trainer.train()
    assert not sys.modules.keys() & set(HIDDEN)
    (out / "logs.json").write_text(json.dumps(trainer.state.log_history))
    save_file({name: p.detach().clone() for name, p in trainer.model.named_parameters()}, out / "weights.safetensors")


if __name__ == "__main__":
    sys.meta_path.insert(0, Hidden)
    importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in HIDDEN else find_spec(name, *rest)
    main(Path(sys.argv.pop(1)))
