"""The manifest of a checkpoint: a file that says which run saved it and which files it must contain, so that an
incomplete checkpoint is not resumed from.

    trlx_hybrid_manifest.json    {"run": "5f0c…", "ranks": 2, "ended": true,
                                  "files": {"model.safetensors": [1048576, "9a3e11f0"], …}}    bytes, and digest

The first version is written when a save begins, with `"ended": false`, so that a killed save can be recognised. The
last version is written when all ranks have written their files. Each version replaces the file atomically, so that a
manifest is never incomplete.

A digest is a CRC-32, which detects the damage of a crash or a full disk, but not forgery. For a large file it covers
both ends and pieces between them: reading all of the file would add a tenth to the time of the save.

A checkpoint of stock TRL has no manifest. Incomplete files in it are found by their formats.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

MANIFEST_FILE = "trlx_hybrid_manifest.json"
SENTINEL_FILE = "checkpoint-is-incomplete.txt"
"""The file by which transformers' `JITCheckpointCallback` marks an incomplete checkpoint; it is removed when the save
is complete."""

WHOLE = 16 << 20  # bytes; a file of at most this size is read completely
END = 1 << 20  # bytes read at each end of a larger file
PIECE, STRIDE = 64 << 10, 16 << 20  # bytes of each piece in between, and from one piece's start to the next

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's manifest.

    Attributes:
        run: id of the run that saved the checkpoint.
        ranks: how many ranks the run had.
        ended: whether the save was completed.
        files: bytes and digest of each file, by its path in the checkpoint.
    """

    run: str
    ranks: int
    ended: bool = False
    files: dict[str, tuple[int, str]] = field(default_factory=dict)


def begin(checkpoint: Path, run: str, ranks: int) -> None:
    """Write the first manifest of a save, which says that the save is under way. Make the checkpoint's folder if there
    is none.

    If another run or a killed save has left files in this folder, they are removed first: they would be taken for a
    part of this checkpoint.

    Args:
        run: id of the run.
        ranks: how many ranks the run has.
    """
    try:
        before = read(checkpoint)
        left = before is not None and not (before.ended and before.run == run)
    except ValueError:
        left = True
    if left or (not (checkpoint / MANIFEST_FILE).exists() and (checkpoint / TRAINER_STATE_NAME).exists()):
        shutil.rmtree(checkpoint)
    checkpoint.mkdir(parents=True, exist_ok=True)
    _write(checkpoint, Manifest(run=run, ranks=ranks))


def end(checkpoint: Path, run: str, ranks: int) -> None:
    """Write the complete manifest of a checkpoint, with all of its files. Called after all ranks have written their
    files, and before older checkpoints are removed.

    Args:
        run: id of the run.
        ranks: how many ranks the run has.
    """
    files = {path.relative_to(checkpoint).as_posix(): digest(path) for path in _files(checkpoint)}
    _write(checkpoint, Manifest(run=run, ranks=ranks, ended=True, files=files))


def read(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None where it has none.

    Raises:
        ValueError: the manifest cannot be read.
    """
    try:
        text = (checkpoint / MANIFEST_FILE).read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{MANIFEST_FILE} cannot be read ({error})") from error
    try:
        found = json.loads(text)
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in found.pop("files").items()}
        return Manifest(**found, files=files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST_FILE} cannot be read ({error!r:.80})") from error


def fault(checkpoint: Path, manifest: Manifest | None) -> str | None:
    """Return the first difference between a checkpoint's files and its manifest, as text; None where there is none.
    A checkpoint without a manifest is judged by its files' names and formats."""
    if manifest is None:
        return _fault_of_formats(checkpoint)
    if not manifest.ended:
        return "its save did not come to its end"
    if (checkpoint / SENTINEL_FILE).exists():
        return f"{SENTINEL_FILE} says that its save did not come to its end"
    for name, (size, then) in sorted(manifest.files.items()):
        try:
            now, found = digest(checkpoint / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if now != size:
            return f"{name} has {now:,} bytes, and was saved with {size:,}"
        if found != then:
            return f"{name} holds other bytes than were saved"
    return None


def digest(file: Path) -> tuple[int, str]:
    """Return a file's size in bytes, and a CRC-32 as hexadecimal digits. Of a large file the CRC covers only the
    beginning, the end and samples in between, which `parts` yields."""
    found = 0
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        for start, length in parts(size):
            opened.seek(start)
            while length > 0 and (read := opened.read(length)):
                found = zlib.crc32(read, found)
                length -= len(read)
    return size, f"{found:08x}"


def parts(size: int) -> Iterator[tuple[int, int]]:
    """Yield begin and length, in bytes, of the parts of a file that its digest covers."""
    if size <= WHOLE:
        yield 0, size
        return
    yield 0, END
    yield from ((start, PIECE) for start in range(STRIDE, size - END, STRIDE))
    yield size - END, END


def _files(checkpoint: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint and its subfolders, except manifests and files that another save is about to
    rename."""
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name not in (MANIFEST_FILE, SENTINEL_FILE) and path.suffix != ".part":
            yield path


def _write(checkpoint: Path, manifest: Manifest) -> None:
    part = checkpoint / f"{MANIFEST_FILE}.{os.getpid()}.part"
    part.write_text(json.dumps(asdict(manifest), indent=1))
    part.replace(checkpoint / MANIFEST_FILE)


def _fault_of_formats(checkpoint: Path) -> str | None:
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
