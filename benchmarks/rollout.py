"""Tokens per second of the in-process engine, called as a trainer calls it, against TRL's own colocate path.

Both arms call TRL's `generate(prompts, images, num_generations, profiler)`: TRL's VLLMGeneration, and what a hybrid
trainer puts in its place. vLLM keeps one engine per process, so each arm has a process of its own; all hold their
engine on the same device, with the same settings, and repeat in turn while the others wait. Completions are of one
length, or of lengths drawn from a lognormal distribution, the same rows in all arms.

Arm `tuned` is TRL's path with what a user can set: tokens are not turned into text. Arm `seedless` samples in our
engine with no seeds on the requests, which shows what seeds cost. On a GPU, arm `single` decodes one token of each
request in a step of our engine, where small models decode several.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .contestants import GROUP, Hybrid, StockTRL
from .harness import Arm, Measurement, alternate
from .lengths import Lengths
from .result import Result, accelerator
from .scale import Scale, Variant
from .worker import Worker, wait_until_built

BUILD_SECONDS, REPEAT_SECONDS = 420.0, 120.0

SCALES = {
    "135m": Scale(
        config={
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        prompt_tokens=64,
        cases=(Lengths(sequences=128, longest=192), Lengths(sequences=128, longest=192, median=48, sigma=0.8)),
        kv_cache_bytes=4 << 30,
        repetitions=5,
    ),
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
        cases=(
            Lengths(sequences=64, longest=512),
            Lengths(sequences=256, longest=512),
            Lengths(sequences=64, longest=2048, median=512, sigma=0.8),
        ),
        kv_cache_bytes=8 << 30,
        repetitions=5,
    ),
    "7b": Scale(
        config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        prompt_tokens=128,
        cases=(Lengths(sequences=64, longest=512), Lengths(sequences=64, longest=2048, median=512, sigma=0.8)),
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
            "initializer_range": 0.1,  # spreads the logits: greedy choices must not depend on rounding
        },
        prompt_tokens=16,
        cases=(
            Lengths(sequences=8, longest=64),
            Lengths(sequences=32, longest=64),
            Lengths(sequences=8, longest=64, median=16, sigma=0.8),
        ),
        kv_cache_bytes=64 << 20,
        repetitions=3,
    ),
}


def write_model(folder: Path, scale: Scale) -> None:
    """Write random weights (bf16 on a GPU, else fp32) and a tokenizer: TRL's path loads its engine from a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        # A padding token would have an embedding of zeros, and gradients of a prompt that begins with it overflow.
        config = AutoConfig.for_model("qwen2", **scale.config, eos_token_id=0)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tokenizer(scale.config["vocab_size"]).save_pretrained(folder)


def tokenizer(size: int) -> Any:
    """Return a byte-level tokenizer in which every id is a word: stock TRL turns each token into text, at a cost."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", *(f"Ġ{index:x}" for index in range(1, size))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<eos>"))
    word = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), word])
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left")


def compare(workers: Mapping[str, Worker], lengths: Lengths, repetitions: int) -> list[Measurement]:
    """Measure all arms at one size."""

    def arm(name: str, worker: Worker, method: str) -> Arm:
        return Arm(name, lambda turn: worker.call(method, lengths, turn, seconds=REPEAT_SECONDS))

    arms = [arm(name, worker, "repeat") for name, worker in workers.items()]
    arms.append(arm("seedless", workers["hybrid"], "repeat_seedless"))
    if not accelerator().startswith("cpu"):
        arms.append(arm("single", workers["hybrid"], "repeat_single"))
    return alternate(arms, warmup=1, repetitions=repetitions, case=lengths.name)


def greedy_agreement(workers: Mapping[str, Worker]) -> float:
    """Return the share of greedy tokens on which a contestant agrees with TRL; the lowest of all contestants."""
    theirs, *others = (worker.call("greedy", seconds=REPEAT_SECONDS) for worker in workers.values())
    return min(_agreement(theirs, ours) for ours in others)


def _agreement(theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> float:
    pairs = [pair for rows in zip(theirs, ours, strict=True) for pair in zip(*rows, strict=True)]
    return sum(1 for left, right in pairs if left == right) / len(pairs)


def metrics_of(measurements: Sequence[Measurement], cases: Sequence[Lengths], warmup: int = 1) -> dict[str, float]:
    """Return tokens per second of each arm, and our speed-up over TRL and over TRL tuned, for each case."""
    medians = {(m.case, m.arm): m.median for m in measurements}
    metrics: dict[str, float] = {}
    for lengths in cases:
        for m in measurements:
            if m.case == lengths.name:
                metrics[f"seconds_{m.arm}_{m.case}"] = m.median
                tokens = [sum(lengths.draw(warmup + turn)) for turn in range(len(m.seconds))]
                rates = [count / seconds for count, seconds in zip(tokens, m.seconds)]
                metrics[f"tokens_per_second_{m.arm}_{m.case}"] = statistics.median(rates)
        ours = medians[lengths.name, "hybrid"]
        metrics[f"speedup_{lengths.name}"] = medians[lengths.name, "trl"] / ours
        metrics[f"speedup_over_tuned_{lengths.name}"] = medians[lengths.name, "tuned"] / ours
    return metrics


def run(model: str, repetitions: int, cases: Sequence[str] = (), profiles: str | None = None) -> Result:
    """Build all contestants at once, check that they agree, and let them repeat in turn.

    Args:
        model: a key of SCALES.
        repetitions: repetitions of each arm.
        cases: names of lengths; all where none is given.
        profiles: a folder for profiles of some additional tokens of ours.
    """
    scale, device = SCALES[model], accelerator()
    scale = dataclasses.replace(scale, cases=tuple(c for c in scale.cases if c.name in cases or not cases))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-rollout-"))
        write_model(Path(folder), scale)
        started = time.perf_counter()
        contestants = {"trl": (StockTRL, True), "tuned": (StockTRL, False), "hybrid": (Hybrid, True)}
        workers = {
            name: stack.enter_context(Worker(name, factory, folder, scale, Variant(detokenize=detokenize)))
            for name, (factory, detokenize) in contestants.items()
        }
        wait_until_built(workers.values(), BUILD_SECONDS)
        build_seconds = time.perf_counter() - started
        print(f"all engines built in {build_seconds:.0f} s", flush=True)
        agreement = greedy_agreement(workers)
        if device.startswith("cpu") and agreement < 1.0:  # fp32 there; in bf16 kernels may round differently
            raise RuntimeError(f"Only {agreement:.1%} of the greedy tokens agree in fp32.")
        measurements: list[Measurement] = []
        for lengths in scale.cases:
            found = compare(workers, lengths, repetitions)
            print(f"{lengths.name}: {'; '.join(f'{m.arm} {m.median:.2f} s' for m in found)}", flush=True)
            measurements += found
            if profiles:
                workers["hybrid"].call("profiled", lengths, f"{profiles}/{lengths.name}", seconds=REPEAT_SECONDS)
    return Result(
        benchmark="rollout" if model == "1.5b" else f"rollout_{model}",  # goals refer to the former
        device=device,
        peer="trl",
        measurements=measurements,
        metrics=metrics_of(measurements, scale.cases) | {"greedy_agreement": agreement},
        settings={
            "model": model,
            "config": dict(scale.config),
            "prompt_tokens": scale.prompt_tokens,
            "lengths": {lengths.name: dataclasses.asdict(lengths) for lengths in scale.cases},
            "num_generations": GROUP,
            "max_num_seqs": scale.max_num_seqs,
            "kv_cache_bytes": scale.kv_cache_bytes,
            "build_seconds": round(build_seconds, 1),
        },
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--model", choices=sorted(SCALES), default="1.5b", help="tiny is for a CPU (default: 1.5b)")
    parser.add_argument("--repetitions", type=int, help="of each arm (default: 5, tiny 3)")
    names = [lengths.name for scale in SCALES.values() for lengths in scale.cases]
    parser.add_argument("--case", choices=sorted(set(names)), action="append", help="may be repeated (default: all)")
    parser.add_argument("--add", action="store_true", help="keep the other cases of the result file")
    parser.add_argument("--profile", metavar="FOLDER", help="record some decode steps of ours there")
    arguments = parser.parse_args(argv)
    repetitions = arguments.repetitions or SCALES[arguments.model].repetitions
    run(arguments.model, repetitions, arguments.case or (), arguments.profile).publish(add=arguments.add)


if __name__ == "__main__":
    main()
