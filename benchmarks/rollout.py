"""Tokens per second of the in-process engine, reached as a trainer reaches it, against TRL's own colocate path.

Both are TRL's `generate(prompts, images, num_generations, profiler)`: once of TRL's VLLMGeneration, once of what a
hybrid trainer puts in its place. vLLM keeps one engine per process, so each arm has a process of its own; both hold
their engine on the same device, with the same settings, and repeat in turn while the other waits.

A third arm, without a goal, samples in our engine with no seeds on the requests: what seeds cost, if anything.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .contestants import GROUP, Hybrid, StockTRL
from .harness import Arm, Measurement, alternate
from .result import Result, accelerator
from .scale import Scale
from .worker import Worker, wait_until_built

BUILD_SECONDS, REPEAT_SECONDS = 420.0, 120.0

SCALES = {
    "1.5b": Scale(
        config={
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
        prompt_tokens=128,
        cases=((64, 512), (256, 512)),
        kv_cache_bytes=8 << 30,
        repetitions=5,
    ),
    "tiny": Scale(
        config={
            "vocab_size": 4096,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "initializer_range": 0.1,  # spreads the logits: greedy choices must not hang on rounding
        },
        prompt_tokens=16,
        cases=((8, 64), (32, 64)),
        kv_cache_bytes=64 << 20,
        repetitions=3,
    ),
}


def write_model(folder: Path, scale: Scale) -> None:
    """Random weights and a tokenizer: TRL's path loads its engine from a folder. bf16 on a GPU, fp32 on a CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model("qwen2", **scale.config, eos_token_id=0, pad_token_id=0)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tokenizer(scale.config["vocab_size"]).save_pretrained(folder)


def tokenizer(size: int) -> Any:
    """A byte-level tokenizer in which every id is a word: stock TRL turns each token into text, and pays for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", *(f"Ġ{index:x}" for index in range(1, size))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<eos>"))
    word = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), word])
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left")


def compare(trl: Worker, hybrid: Worker, sequences: int, tokens: int, repetitions: int) -> list[Measurement]:
    """All arms at one size."""

    def arm(name: str, worker: Worker, method: str) -> Arm:
        return Arm(name, lambda turn: worker.call(method, sequences, tokens, turn, seconds=REPEAT_SECONDS))

    arms = [arm("trl", trl, "repeat"), arm("hybrid", hybrid, "repeat"), arm("seedless", hybrid, "repeat_seedless")]
    return alternate(arms, warmup=1, repetitions=repetitions, case=f"{sequences}x{tokens}")


def greedy_agreement(trl: Worker, hybrid: Worker) -> float:
    """The share of tokens that both contestants choose alike when nothing is left to chance."""
    theirs, ours = (worker.call("greedy", seconds=REPEAT_SECONDS) for worker in (trl, hybrid))
    pairs = [pair for left, right in zip(theirs, ours, strict=True) for pair in zip(left, right, strict=True)]
    return sum(1 for left, right in pairs if left == right) / len(pairs)


def metrics_of(measurements: Sequence[Measurement], cases: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Tokens per second of each arm and our speed-up over TRL, for each case."""
    medians = {(m.case, m.arm): m.median for m in measurements}
    metrics: dict[str, float] = {}
    for sequences, tokens in cases:
        case = f"{sequences}x{tokens}"
        metrics |= {
            f"tokens_per_second_{arm}_{case}": sequences * tokens / seconds
            for (measured, arm), seconds in medians.items()
            if measured == case
        }
        metrics[f"speedup_{case}"] = medians[case, "trl"] / medians[case, "hybrid"]
    return metrics


def run(model: str, repetitions: int) -> Result:
    """Build both contestants at once, check that they agree, and let them repeat in turn."""
    scale, device = SCALES[model], accelerator()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-rollout-"))
        write_model(Path(folder), scale)
        started = time.perf_counter()
        trl = stack.enter_context(Worker("trl", StockTRL, folder, scale))
        hybrid = stack.enter_context(Worker("hybrid", Hybrid, folder, scale))
        wait_until_built([trl, hybrid], BUILD_SECONDS)
        build_seconds = time.perf_counter() - started
        print(f"both engines built in {build_seconds:.0f} s", flush=True)
        agreement = greedy_agreement(trl, hybrid)
        if device.startswith("cpu") and agreement < 1.0:  # fp32 there; in bf16 kernels may round differently
            raise RuntimeError(f"Only {agreement:.1%} of the greedy tokens agree in fp32.")
        measurements = [m for case in scale.cases for m in compare(trl, hybrid, *case, repetitions)]
    return Result(
        benchmark="rollout" if model == "1.5b" else f"rollout_{model}",  # goals are about the former
        device=device,
        peer="trl",
        measurements=measurements,
        metrics=metrics_of(measurements, scale.cases) | {"greedy_agreement": agreement},
        settings={
            "model": model,
            "config": dict(scale.config),
            "prompt_tokens": scale.prompt_tokens,
            "num_generations": GROUP,
            "max_num_seqs": scale.max_num_seqs,
            "kv_cache_bytes": scale.kv_cache_bytes,
            "build_seconds": round(build_seconds, 1),
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--model", choices=sorted(SCALES), default="1.5b", help="tiny is for trying it on a CPU")
    parser.add_argument("--repetitions", type=int, help="default: 5, tiny 3")
    arguments = parser.parse_args(argv)
    run(arguments.model, arguments.repetitions or SCALES[arguments.model].repetitions).publish()


if __name__ == "__main__":
    main()
