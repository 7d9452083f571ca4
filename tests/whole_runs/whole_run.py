"""A user's command from the shell to its end, and what it left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cases import IN_4_BITS, ONE_STEP, STEPS, Case, flags, zero
from trlx_hybrid_ray import reaper

SCRIPTS = Path(__file__).parent / "scripts"
MARK = "TRLX_WHOLE_RUN"  # in the environment of every process of a run
LEAVING = 20.0  # seconds from the last line of training to the end of the command
STACKS = 10.0  # seconds to write them
MEMORY_SLACK = 64  # MiB that a GPU's driver may keep or give back between two looks


@dataclass
class Ended:
    """A command that has ended, by itself or not.

    Attributes:
        hung: it had to be ended; its output then closes with the Python stacks of all its processes.
        output: standard output and error.
        leaving: seconds from the line that closes training to the end; None where there was no such line.
        left: what is still there of it, in words.
    """

    command: Sequence[str]
    returncode: int
    hung: bool
    seconds: float
    output: str
    leaving: float | None = None
    left: list[str] = field(default_factory=list)

    def proofs(self) -> list[tuple[str, int, float | None]]:
        """(path, tensors compared, log-prob gap) of each weight sync, as scripts/grpo.py prints it."""
        found = re.findall(r"PROOF path=(\w+) verified=(\d+) gap=(None|[-+.e\d]+)", self.output)
        return [(path, int(verified), None if gap == "None" else float(gap)) for path, verified, gap in found]

    def traces(self) -> list[dict[str, Any]]:
        """What scripts/grpo.py says of each rank's engine, then of each sync and rollout, as they came; of syncs that
        bring the same weights again, which gathered weights need and others do not, the first."""
        found = [json.loads(trace) for trace in re.findall(r"TRACE (\{[^{}]*\})", self.output)]
        first = {(trace["rank"], trace.get("weights", trace["number"])): trace["number"] for trace in reversed(found)}
        found = [t for t in found if first[t["rank"], t.get("weights", t["number"])] == t["number"]]
        return sorted(found, key=lambda trace: (trace["number"], trace["rank"]))


def run(
    command: Sequence[object], limit: float, environment: dict[str, str] | None = None, kill_at: str | None = None
) -> Ended:
    """Start it in a session of its own and wait for its end. Where TRLX_WHOLE_OUTPUT names a folder, what it prints is
    kept there as it comes, each line with its second.

    Args:
        limit: seconds, after which every process is made to write its stacks and is killed.
        kill_at: a text in the output at which all processes are killed at once.
    """
    mark = uuid.uuid4().hex
    variables = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", MARK: mark} | (environment or {})
    memory, own, over = gpu_memory(), set[str](), threading.Event()
    folder = os.environ.get("TRLX_WHOLE_OUTPUT")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    started = time.monotonic()
    process = subprocess.Popen(
        words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    lines: list[str] = []
    last: list[float] = []

    kept = Path(folder, f"{process.pid}.log") if folder else Path(os.devnull)

    def follow() -> None:
        assert process.stdout is not None
        with kept.open("w", buffering=1) as out:
            out.write(f"{words}\n")
            for line in process.stdout:
                lines.append(line)
                out.write(f"{time.monotonic() - started:.1f} {line}")
                see(line)

    def see(line: str) -> None:
        if "train_runtime" in line:
            last.append(time.monotonic())
        if kill_at is not None and kill_at in line:
            kill(mark, signal.SIGKILL)

    def watch() -> None:
        while not over.wait(0.5):
            own.update(*map(mapped, processes(mark)))

    reader, watcher = (threading.Thread(target=work, daemon=True) for work in (follow, watch))
    reader.start()
    watcher.start()
    hung = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        hung = True
        kill(mark, signal.SIGABRT)
        time.sleep(STACKS)
    ended = time.monotonic()
    over.set()
    watcher.join()
    left = [] if hung else left_behind(mark, memory, own)
    kill(mark, signal.SIGKILL)
    process.wait()
    reader.join(10)
    assert process.stdout is not None
    process.stdout.close()
    leaving = ended - last[-1] if last else None
    return Ended(words, process.returncode, hung, ended - started, "".join(lines), leaving, left)


def processes(mark: str) -> list[int]:
    """Of a run, its children's children included."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return found


def kill(mark: str, number: int) -> None:
    """Send a signal to all of them."""
    for pid in processes(mark):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def left_behind(mark: str, memory: dict[str, int], own: set[str]) -> list[str]:
    """What a run has not cleaned up, `own` segments of shared memory among it; looked at again for some seconds, since
    drivers take their time."""
    ends = time.monotonic() + 10
    while True:
        found = [f"process {pid}" for pid in processes(mark)]
        found += [path for path in sorted(own) if Path(path).exists()]
        now = gpu_memory()
        found += [f"GPU {n}: {now[n] - was} MiB" for n, was in memory.items() if now[n] > was + MEMORY_SLACK]
        if not found or time.monotonic() > ends:
            return found
        time.sleep(0.5)


def mapped(pid: int) -> set[str]:
    """Files of shared memory that a process uses and that have a name."""
    return {reaper.SHARED_MEMORY + name for name in reaper.mapped(pid)}


def gpu_memory() -> dict[str, int]:
    """MiB in use on each GPU this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.split("\n")
    except FileNotFoundError:
        return {}
    used = dict(row.split(", ") for row in rows if row)
    return {n: int(mib) for n, mib in used.items() if visible is None or n in visible.split(",")}


def history(folder: Path) -> list[dict[str, float]]:
    """What the trainer logged, without what tells the time; from its last checkpoint."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name.split("-")[1]))
    assert states, f"no checkpoint in {folder}"
    timing = ("runtime", "per_second", "step_time", "hybrid/")
    return [
        {key: value for key, value in log.items() if not any(word in key for word in timing)}
        for log in json.loads(states[-1].read_text())["log_history"]
    ]


def check_whole(ended: Ended) -> None:
    """It ended by itself, soon and clean."""
    said = "\n".join([" ".join(ended.command), ended.output[-12000:]])
    assert not ended.hung, f"it hung; the stacks of all ranks:\n{said}"
    assert ended.returncode == 0, said
    assert ended.leaving is None or ended.leaving < LEAVING, f"{ended.leaving:.0f} s from the last step to the end"
    assert not ended.left, ended.left
    assert "leaked shared_memory" not in ended.output, said


def check_fails(ended: Ended) -> None:
    """scripts/fails.py ended with its own error, and nothing of it is left."""
    said = ended.output[-8000:]
    assert not ended.hung, f"it hung; the stacks of all ranks:\n{said}"
    assert ended.returncode == 1, said
    assert "the third batch has no such column" in ended.output, said
    assert not ended.left, ended.left


def check_training(logs: list[dict[str, float]], steps: int) -> None:
    """Steps, an evaluation, and nothing but numbers."""
    losses = [log for log in logs if "loss" in log]
    assert len(losses) >= steps, logs
    assert any("eval_reward" in log for log in logs), logs
    for log in logs:
        for key, value in log.items():
            assert not isinstance(value, float) or abs(value) < float("inf"), (key, log)


def check_gap(logs: list[dict[str, float]]) -> float:
    """Largest mean difference between engine's and trainer's log-probs of a step, in nats: below what bf16 explains."""
    gaps = [log[key] for log in logs if (key := "sampling/sampling_logp_difference/mean") in log]
    assert gaps, logs
    assert max(gaps) < 0.1, gaps
    return max(gaps)


def check_proofs(ended: Ended, path: str, probed: bool = True) -> None:
    """Every sync compared all tensors, and the engine scores as the policy does, where a probe was scored."""
    proofs = ended.proofs()
    assert len(proofs) >= 6, ended.output[-8000:]
    assert {name for name, _, _ in proofs} == {path}, proofs
    assert len({verified for _, verified, _ in proofs}) == 1, proofs
    assert proofs[-1][1] > 0, proofs
    assert all(gap is not None and gap < 0.5 if probed else gap is None for _, _, gap in proofs), proofs


def check_trained(ended: Ended, folder: Path, path: str, seen: dict[str, Any], probed: bool = True) -> None:
    """It trained all steps, each weight sync was proven, and how far apart both score is kept."""
    logs = history(folder)
    check_training(logs, STEPS)
    check_proofs(ended, path, probed)
    seen["gap"] = check_gap(logs)


def check_adapters(
    command: Sequence[Any],
    changes: dict[str, object],
    model: Path,
    whole: Callable[..., Ended],
    folder: Path,
    limit: float,
    environment: dict[str, str] | None = None,
) -> None:
    """Check that two active adapters train with a reference, both and nothing else, and that they resume.

    The policy and its reference are the same at the first step; after a resume they are as far apart as they were.
    """
    settings = Case("lora", sleep=True, graphs=False).settings() | {"beta": 0.1, "learning_rate": 1e-3} | changes
    resumes = {"resume_from_checkpoint": folder / "whole" / "checkpoint-3"}
    found = []
    for name, given in {"whole": settings, "resumed": settings | resumes}.items():
        ended = whole([*command, *flags(given, model, folder / name)], limit, environment=environment)
        check_training(history(folder / name), STEPS)
        found.append([log["kl"] for log in history(folder / name) if "kl" in log])
        first, second, base = map(
            int, re.findall(r"MOVED {'first': (\d+), 'second': (\d+)} BASE (\d+)", ended.output)[0]
        )
        assert first == second > 0 == base, ended.output[-4000:]
    kl, resumed = found
    assert abs(kl[0]) < 1e-6 < min(kl[1:]), kl
    assert resumed[:3] == kl[:3]
    assert resumed[3] == pytest.approx(kl[3], rel=0.05), (kl, resumed)


def check_packed(ended: Ended) -> None:
    """Its rows were scored without padding, from the first comparison on, and layers kept by the memory there was."""
    assert "scoring: rows are packed" in ended.output, ended.output[:8000]
    assert "layers are recomputed as far as memory asks for it" in ended.output, ended.output[:8000]
    assert "Rows stay padded" not in ended.output, ended.output[-8000:]


def check_pictures(
    case: Case,
    changes: dict[str, object],
    model: Callable[[str], Path],
    whole: Callable[..., Ended],
    seen: dict[str, Any],
    folder: Path,
    limit: float,
    *,
    name: str = "pictures",
    launcher: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> None:
    """A vision-language model trains to its end as others do, its tower's weights among those that are proven; with a
    `rollout`, in an environment that shows it more pictures after each turn."""
    pytest.importorskip("torchvision", reason="the processors of vision-language models need torchvision")
    settings = case.settings() | changes
    script = SCRIPTS / ("gallery.py" if "rollout" in settings else "pictures.py")
    if case.weights == "lora":
        settings |= {"lora_target_modules": ".*language_model.*_proj"}
    command = [sys.executable, *launcher, script, *flags(settings, model(name), folder)]
    ended = whole(command, limit, environment=environment)
    check_trained(ended, folder, case.path, seen)


def check_experts(
    case: Case,
    changes: dict[str, object],
    launcher: Sequence[str],
    model: Path,
    whole: Callable[..., Ended],
    seen: dict[str, Any],
    folder: Path,
    limit: float,
    environment: dict[str, str] | None = None,
) -> None:
    """A mixture of experts trains to its end, an adapter of its attention too; how far apart engine and trainer score
    is kept, with router replay and without."""
    settings = case.settings() | {"weights": case.path} | changes
    if case.weights == "lora":
        settings |= {"lora_target_modules": ".*self_attn.*_proj", "lora_dropout": 0.0}  # which the engine has none of
    command = [sys.executable, *launcher, SCRIPTS / "grpo.py", *flags(settings, model, folder)]
    ended = whole(command, limit, environment=environment)
    check_trained(ended, folder, case.path, seen)


@contextmanager
def held_back(gib: int) -> Iterator[None]:
    """A process holds all but so much of the GPU, as if it were a smaller one."""
    command = [sys.executable, SCRIPTS / "holds.py", str(gib)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.kill()


def check_4_bits(
    case: Case,
    changes: dict[str, object],
    model: Path,
    whole: Callable[..., Ended],
    seen: dict[str, Any],
    folder: Path,
    limit: float,
) -> None:
    """A base in 4 bits trains beside the engine, its values proven at every sync."""
    pytest.importorskip("bitsandbytes")
    settings = case.settings() | IN_4_BITS | changes
    ended = whole([sys.executable, SCRIPTS / "grpo.py", *flags(settings, model, folder)], limit)
    check_trained(ended, folder, "lora", seen)


def check_deepspeed(
    stage: int,
    settings: dict[str, object],
    command: Sequence[Any],
    model: Path,
    whole: Callable[..., Ended],
    seen: dict[str, Any],
    folder: Path,
    limit: float,
) -> None:
    """Weights that DeepSpeed holds reach the engine, from ZeRO-3's parts of them, too."""
    pytest.importorskip("deepspeed")
    ended = whole([*command, *flags(settings | zero(stage), model, folder)], limit)
    check_trained(ended, folder, "gather" if stage == 3 else "copy", seen, probed=stage < 3)


def check_repeats(runs: Sequence[Ended]) -> None:
    """What scripts/repeats.py sampled is the same each time, bit for bit, and in each of the runs."""
    for ended in runs:
        assert ", 0 rows apart" in ended.output, "\n".join(re.findall("APART .*", ended.output)[:20])
    firsts = [re.findall("FIRST .*", ended.output) for ended in runs]
    assert len({str(first) for first in firsts}) == 1, firsts


def differences(logs: list[dict[str, float]], others: list[dict[str, float]]) -> list[str]:
    """What two runs logged differently, in words, in the order of the logs."""
    if len(logs) != len(others):
        return [f"{len(logs)} logs and {len(others)}"]
    return [
        f"step {log.get('step')}: {key} {log.get(key)} and {other.get(key)}"
        for log, other in zip(logs, others, strict=True)
        for key in sorted(log.keys() | other.keys())
        if log.get(key) != other.get(key)
    ]


def parting(one: Ended, other: Ended) -> str:
    """Where two runs part that should compute the same, and so whose arithmetic it is."""
    engines: list[str] = []
    for mine, theirs in zip(one.traces(), other.traces(), strict=False):
        apart = [key for key in mine if key != "number" and mine[key] != theirs.get(key)]
        if mine["at"] == theirs["at"] == "the engine":
            engines += [f"{key} {mine[key]} and {theirs[key]}" for key in apart]
        elif apart:
            whose = "the trainer, after equal rollouts" if "weights" in apart else "the engine, with equal weights"
            at = f"first at {mine['at']} on rank {mine['rank']}, in {' and '.join(apart)}: {whose}"
            break
    else:
        at = "nowhere in weights, tokens and log-probs: what is logged of them is computed otherwise"
    return f"they part {at}; their engines differ in {', '.join(engines) or 'nothing'}"


def check_case(
    case: Case,
    launcher: Sequence[str],
    model: Path,
    folder: Path,
    whole: Callable[..., Ended],
    seen: dict[str, Any],
    limit: float,
    *,
    environment: dict[str, str] | None = None,
    changes: dict[str, object] | None = None,
    path: str | None = None,
    gather: bool = True,
) -> None:
    """The plain script trains to its end, its weights proven at every sync; so it does with gathered weights, alike.

    With CUDA graphs, a run of one step comes before: both runs load what it has compiled. A process that compiles and
    one that loads the same rounded differently, twice, with equal weights, and those that loaded it never.

    Args:
        launcher: arguments of Python that start the script, before its name.
        folder: of the runs.
        whole, seen: the fixtures.
        changes: of the case's settings.
        path: the weight sync expected, where it is not the case's.
        gather: whether to run it with gathered weights, too, where that repeats.
    """
    settings = case.settings() | (changes or {})
    variables = case.environment(folder) | (environment or {})

    def start(name: str, given: dict[str, object]) -> Ended:
        words = flags(given, model, folder / name)
        return whole([sys.executable, *launcher, SCRIPTS / "grpo.py", *words], limit, environment=variables)

    def train(name: str, given: dict[str, object], expected: str) -> tuple[list[dict[str, float]], Ended]:
        ended = start(name, given)
        logs = history(folder / name)
        check_training(logs, STEPS)
        check_proofs(ended, expected)
        assert ended.traces(), ended.output[-8000:]
        return logs, ended

    compared = gather and case.repeats
    if compared and case.graphs:
        start("compiles", settings | ONE_STEP)
    logs, ended = train("run", settings, path or case.path)
    seen["gap"] = check_gap(logs)
    if compared:
        others, other = train("gather", settings | {"weights": "gather"}, "gather")
        if apart := differences(logs, others):  # so that a report tells a wrong sync from arithmetic that differs
            again, once_more = train("again", settings, path or case.path)
            said = "repeats itself"
            if changed := differences(logs, again):
                said = f"does not repeat itself either, {changed[:6]}: {parting(ended, once_more)}"
            seen["note"] = f"with gathered weights it logs otherwise: {parting(ended, other)}. The run {said}."
            raise AssertionError(f"{seen['note']}\n{apart[:12]}")
