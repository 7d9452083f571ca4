"""Host memory that is free, where a container has a limit of its own."""

import psutil
import pytest
from trlx_hybrid.memory import host

GIB = 1 << 30


@pytest.fixture
def group(tmp_path, monkeypatch):
    """`group(path, **files)`: writes a cgroup's files. The process is in /pod/box, and the host has 100 GiB."""
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100 * GIB})())
    (tmp_path / "own").write_text("3:cpuset:/pod/box\n4:memory:/pod/box\n0::/pod/box\n")

    def write(path, **files):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / path / name.replace("__", ".")).write_text(f"{text}\n")

    return write


def test_a_host_without_limits_has_what_it_has(group):
    assert host.free_bytes() == 100 * GIB


def test_no_file_of_cgroups_is_needed(group, tmp_path):
    (tmp_path / "own").unlink()
    assert host.free_bytes() == 100 * GIB


def test_a_limit_leaves_what_is_not_used_or_can_be_freed(group):
    stat = f"anon {20 * GIB}\ninactive_file {10 * GIB}"
    group("pod/box", memory__max=64 * GIB, memory__current=30 * GIB, memory__stat=stat)
    assert host.free_bytes() == 44 * GIB


def test_the_limit_of_a_group_above_counts_too(group):
    group("pod/box", memory__max="max", memory__current=30 * GIB, memory__stat="inactive_file 0")
    group("pod", memory__max=40 * GIB, memory__current=39 * GIB, memory__stat="inactive_file 0")
    assert host.free_bytes() == GIB


def test_the_first_version_of_cgroups(group):
    files = {"memory__limit_in_bytes": 8 * GIB, "memory__usage_in_bytes": 9 * GIB}
    group("memory/pod/box", **files, memory__stat=f"inactive_file 5\ntotal_inactive_file {3 * GIB}")
    assert host.free_bytes() == 2 * GIB


def test_this_process_has_memory():
    assert 0 < host.free_bytes() <= psutil.virtual_memory().total
