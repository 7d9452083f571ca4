"""Checks of the format of a checkpoint's files, which find incomplete files in a checkpoint without a manifest (which
would list sizes and digests)."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Names from transformers.trainer, whose import takes seconds: `checkpoint_to_resume` runs before a rank needs it.
TRAINER_STATE_NAME = "trainer_state.json"
SCHEDULER_NAME = "scheduler.pt"
OPTIMIZER_NAME, OPTIMIZER_NAME_BIN = "optimizer.pt", "optimizer.bin"

ZIPPED = re.compile(r".*\.(pt|pth)|(pytorch_model|training_args|optimizer|adapter_model).*\.bin")
"""Names of files that `torch.save` writes, which are zip archives."""

WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin)(\.index\.json)?")
SHARDED = re.compile(r"(pytorch_model_fsdp|optimizer|global_step).*")
"""Names of folders that FSDP and DeepSpeed write."""

GENERATORS = re.compile(r"rng_state(?:_(\d+))?\.pth")


def fault(checkpoint: Path) -> str | None:
    """Return the first reason why a checkpoint without a manifest is incomplete, judged by its files' names and
    formats; None if there is none."""
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return f"{TRAINER_STATE_NAME} is missing"
    try:
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
        problems = ((path, _problem(path)) for path in files)
        found = next((f"{path.relative_to(checkpoint)} {problem}" for path, problem in problems if problem), None)
        return found or next(_absent(checkpoint, {path.name for path in files}), None)
    except OSError as error:  # for example because it is being removed
        return f"it cannot be read ({error})"


def generators(checkpoint: Path) -> int | None:
    """Return how many ranks saved the states of their random generators in a checkpoint; None where none did."""
    return sum(1 for path in checkpoint.iterdir() if GENERATORS.fullmatch(path.name)) or None


def _problem(path: Path) -> str | None:
    try:
        return _malformed(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"cannot be read ({error!r:.80})"


def _malformed(path: Path) -> str | None:
    if path.name.endswith(".index.json"):
        shards = set(json.loads(path.read_text())["weight_map"].values())
        missing = sorted(shard for shard in shards if not (path.parent / shard).is_file())
        return f"names {missing[0]}, which is missing" if missing else None
    if path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".safetensors":
        return _malformed_safetensors(path)
    elif ZIPPED.fullmatch(path.name) and not zipfile.is_zipfile(path):
        return "is cut short"
    return None


def _malformed_safetensors(path: Path) -> str | None:
    """Return a text if the size of a safetensors file differs from the size that its header gives, or None if it does
    not."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        if size < 8 + header:
            return "is cut short"
        tensors = json.loads(file.read(header))
    tensors.pop("__metadata__", None)
    wanted = 8 + header + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    return None if size == wanted else f"has {size:,} bytes, and its header says {wanted:,}"


def _absent(checkpoint: Path, files: set[str]) -> Iterator[str]:
    """Yield a text for each file that is missing from a checkpoint from which a run can resume. Such a checkpoint has
    random generator states or the state of a learning-rate schedule; others yield nothing.

    Args:
        files: names of the checkpoint's files.
    """
    if SCHEDULER_NAME not in files and not any(map(GENERATORS.fullmatch, files)):
        return  # saved with save_only_model, or by a trainer of another kind
    ranks = {int(match[1]) for name in files if (match := GENERATORS.fullmatch(name)) and match[1]}
    several = range(max(2, len(ranks))) if ranks else ()  # a single rank's file has no number
    yield from (f"rng_state_{rank}.pth is missing" for rank in several if rank not in ranks)
    folders = {path.name for path in checkpoint.iterdir() if path.is_dir() and SHARDED.fullmatch(path.name)}
    engine = any(name.startswith("global_step") for name in folders)  # DeepSpeed's folder has weights and optimizer
    if not engine and not any(map(WEIGHTS.fullmatch, files)) and not any("model" in name for name in folders):
        yield "the model's weights are missing"
    sharded = any(name.startswith("optimizer") for name in folders)
    if not engine and not sharded and not files & {OPTIMIZER_NAME, OPTIMIZER_NAME_BIN}:
        yield f"{OPTIMIZER_NAME} is missing"
