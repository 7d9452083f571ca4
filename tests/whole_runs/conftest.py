"""What the whole runs share: models on disk, and the GPUs of each test process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import models
import whole_run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all test processes."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def model(shared: Path) -> Callable[[str], Path]:
    """The folder of a model, by its name in models.py."""

    def find(name: str) -> Path:
        with FileLock(shared / f"{name}.lock"):
            return models.write(name, shared)

    return find


def device() -> str:
    """The name of the first GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()[0]
    except (FileNotFoundError, IndexError):
        return "CPU"


def commit() -> str:
    """Of this checkout; BENCH_COMMIT says it where there is no repository."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE)
    return os.environ.get("BENCH_COMMIT") or described.stdout.strip()


def visible_gpus() -> list[str]:
    """The numbers of those this process may use."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [number for number in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if number]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except FileNotFoundError:
        return []
    return [str(number) for number in range(len(listed.splitlines()))]


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show this test, and what it starts, GPUs of its own; skip it where there are not enough."""
    width = request.module.GPUS
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    there = visible_gpus()
    mine = there[width * worker : width * (worker + 1)]
    if len(mine) < width:
        pytest.skip(f"needs {width} GPUs of its own, and there are {len(there)}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(mine))
    for name, value in {"VLLM_ALLREDUCE_USE_FLASHINFER": "0", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, os.environ.get(name, value))


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Facts of a run for docs/tested.md, kept in the file that TRLX_WHOLE_RUNS names, if it names one."""
    facts: dict[str, Any] = {}
    yield facts
    file = os.environ.get("TRLX_WHOLE_RUNS")
    if file and facts:
        report = getattr(request.node, "reports", {}).get("call")
        known = {"case": request.node.name.removeprefix("test_"), "passed": bool(report and report.passed)}
        known |= {"gpus": getattr(request.module, "GPUS", 0), "device": device(), "commit": commit()}
        facts = known | facts
        with FileLock(f"{file}.lock"), Path(file).open("a") as out:
            out.write(json.dumps(facts) + "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let fixtures see how the test went."""
    outcome: Any = yield
    report = outcome.get_result()
    item.reports = getattr(item, "reports", {}) | {report.when: report}  # type: ignore[attr-defined]


@pytest.fixture
def whole(seen: dict[str, Any]) -> Callable[..., whole_run.Ended]:
    """`whole_run.run`, checked to have ended well, or as `check` says."""

    def start(
        command: list[Any],
        limit: float,
        check: Callable[[whole_run.Ended], None] = whole_run.check_whole,
        **given: Any,
    ) -> whole_run.Ended:
        ended = whole_run.run(command, limit, **given)
        leaving = None if ended.leaving is None else round(ended.leaving, 1)
        run = {"returncode": ended.returncode, "hung": ended.hung, "seconds": round(ended.seconds, 1)}
        seen.setdefault("runs", []).append(run | {"leaving": leaving})
        check(ended)
        return ended

    return start
