"""`trlx-hybrid launch` on two simulated nodes: real Ray, real process groups, real signals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import OBEDIENT, Captured, Segments, launch, nothing_left
from trlx_hybrid_ray.errors import LaunchError, PlacementError, ScriptError
from trlx_hybrid_ray.monitor import LOST_PEER, LaunchFailure, first_of, last_error
from trlx_hybrid_ray.node import NodeActor
from trlx_hybrid_ray.reaper import SHARED_MEMORY


@pytest.fixture
def started(two_nodes, capfd, tmp_path):
    """Launch obedient.py with a word on two nodes; whatever happens, nothing may be left afterwards."""
    segments = Segments()
    yield lambda what, **settings: launch(capfd, tmp_path, OBEDIENT, what, tmp_path, **{"nodes": 2} | settings)
    assert nothing_left(str(tmp_path), segments) == []


def words(folder, name):
    """What the ranks left word of, in rank order."""
    files = sorted(folder.glob(f"{name}.[0-9]"))  # and not those that are being written
    return [json.loads(path.read_text()) for path in files]


@pytest.fixture(scope="module")
def ended_well(session_cluster, tmp_path_factory):
    """A launch whose ranks write a line without an end, map files that somebody staged, and then meet.

    What it printed, and the files.
    """
    folder = tmp_path_factory.mktemp("well")
    staged = Path(tempfile.mkdtemp(dir=SHARED_MEMORY)) / "model.safetensors"
    loose = Path(tempfile.mkstemp(dir=SHARED_MEMORY, prefix="torch_dataset")[1])
    try:
        (folder / "stage").mkdir()
        for name, path in (("model", staged), ("loose", loose)):
            path.write_bytes(b"kept" * 1000)
            (folder / "stage" / name).symlink_to(path)
        segments = Segments()
        with Captured() as captured:
            done = launch(captured, folder, OBEDIENT, "long_line,map_files,together", folder, nodes=2)
        assert nothing_left(str(folder), segments) == []
        yield done, (staged, loose)
    finally:
        shutil.rmtree(staged.parent)
        loose.unlink(missing_ok=True)


def test_ranks_meet_and_every_line_arrives_in_order(ended_well):
    done, _ = ended_well
    assert done.code == 0, done.err
    for rank in range(2):
        lines = done.lines(rank)
        met = lines[lines.index("mapped 2") + 1 :]
        assert met == [*(f"line {number}" for number in range(1000)), "sum 3"]
        prefix = f"[node {rank} rank {rank}] error"
        errors = [line for line in done.err.splitlines() if line.startswith(prefix)]
        assert errors == [f"{prefix} {number}" for number in range(1000)]
    first, second, *_ = done.err.splitlines()  # the map, before anything starts
    assert (first[:25], second[:25]) == ("rank 0 on node 127.0.0.1 ", "rank 1 on node 127.0.0.1 ")


def test_a_line_without_an_end_holds_up_nothing(ended_well):
    done, _ = ended_well
    assert done.code == 0, done.err
    for rank in range(2):
        assert "after" in done.lines(rank)
    assert done.out.count("x") == 400_000


def test_files_that_somebody_staged_in_shared_memory_stay(ended_well):
    done, files = ended_well
    assert done.code == 0, done.err
    assert done.lines(0).count("mapped 2") == 1
    assert [path.read_bytes() for path in files] == [b"kept" * 1000] * 2


@pytest.fixture(scope="module")
def with_gpus(session_cluster, tmp_path_factory):
    """A launch of two ranks with GPUs on each of two nodes, who say what they see; rank 0 starts actors. Its folder."""
    folder, segments = tmp_path_factory.mktemp("gpus"), Segments()
    with Captured() as captured:
        settings = {"nodes": 2, "processes_per_node": 2, "gpus": True}
        done = launch(captured, folder, OBEDIENT, "look,actors", folder, **settings)
    assert nothing_left(str(folder), segments) == []
    return done, folder


def test_each_rank_sees_all_devices_of_its_node(with_gpus):
    done, folder = with_gpus
    assert done.code == 0, done.err
    seen = words(folder, "seen")
    assert len(seen) == 4
    assert re.search(r"^rank 2-3 on node 127.0.0.1 \(\w{6}\), GPU \d+, \d+$", done.err, re.MULTILINE)
    for rank, rank_saw in enumerate(seen):
        variables = rank_saw["environment"]
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["GROUP_RANK"]) == tuple(
            map(str, (rank, rank % 2, rank // 2))
        )
        assert len(variables["CUDA_VISIBLE_DEVICES"].split(",")) == 2
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert rank_saw["argv"] == [OBEDIENT, "look,actors", str(folder)]
        assert rank_saw["folder"] == str(folder)
        assert rank_saw["path"][0] == str(Path(OBEDIENT).parent)
        assert "TRLX_HYBRID_RESUME" not in variables
    assert len({rank_saw["environment"]["MASTER_PORT"] for rank_saw in seen}) == 1


def test_actors_that_a_rank_starts_have_gpus_of_their_own(with_gpus):
    done, folder = with_gpus
    assert done.code == 0, done.err
    (seen,) = words(folder, "actors")
    theirs = [tuple(each) for each in seen["theirs"]]  # which of the nodes the rank is on, Ray cannot tell it here
    assert len(seen["own"].split(",")) == 2
    assert all(device.isdecimal() for _, device in theirs), theirs
    assert len(set(theirs)) == 4, "nobody has a GPU of another"


def test_the_rank_that_failed_first_is_named_last_with_its_traceback(started, tmp_path):
    done = started("fail")
    assert done.code == 1
    *_, last = done.err.strip().splitlines()
    assert last.startswith("Rank 1 failed first (node 127.0.0.1")
    assert last.endswith("ValueError: the reward is nan")
    tail = done.err[done.err.rindex("\nTraceback (most recent call last):") :]
    assert f'File "{OBEDIENT}", line ' in tail
    assert tail.count("Traceback") == 1
    (failed,) = words(tmp_path, "failed")
    assert done.ended - failed["at"] < 30


FOLLOWED = [  # (rank, seconds, code, whether it speaks of a lost peer); the first one of each is what the rest followed
    [(1, 0.4, 3, False), (0, 0.0, -signal.SIGTERM, False)],  # torchelastic's signal, seen before what it was sent for
    [(0, 0.0, -signal.SIGTERM, False), (1, 0.4, 1, True)],  # somebody else's signal
    [(0, 0.0, -signal.SIGTERM, False), (1, 0.1, -signal.SIGTERM, False)],
    [(0, 0.0, -signal.SIGTERM, False), (1, 5.0, 1, False)],
    [(1, 0.3, -signal.SIGKILL, False), (0, 0.0, 1, True)],
    [(0, 0.0, 1, False), (1, 0.2, -signal.SIGABRT, False)],
    [(None, 0.1, -signal.SIGTERM, False), (0, 0.0, -signal.SIGTERM, False)],
]


@pytest.mark.parametrize("told", FOLLOWED)
def test_what_the_others_followed_from(told):
    failures = {LaunchFailure(0, rank, at, code): lost_peer for rank, at, code, lost_peer in told}
    first, *_ = failures
    assert first_of(failures) == first
    assert first_of(dict(reversed(failures.items()))) == first


def test_an_exit_code_is_the_launchers(started):
    done = started("leave")
    assert done.code == 3
    assert "Rank 0 failed first" in done.err
    assert done.err.strip().endswith("the script ended with exit code 3.")


def test_the_text_of_a_syntax_error_is_the_last_line(capfd, two_nodes, tmp_path):
    (tmp_path / "train.py").write_text("x = = 1\n")
    done = launch(capfd, tmp_path, tmp_path / "train.py")
    assert done.code == 1
    assert "    x = = 1\n" in done.err
    assert done.err.strip().splitlines()[-1].endswith("SyntaxError: invalid syntax")


@pytest.mark.parametrize("which", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_ends_all_ranks(started, tmp_path, which):
    over = threading.Event()

    def press():
        while len(words(tmp_path, "waiting")) < 2 and not over.wait(0.1):
            pass
        if not over.is_set():
            os.kill(os.getpid(), which)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    done = started("wait")
    over.set()
    thread.join()
    assert done.code == 128 + which
    assert f"Stopped by {which.name}; every rank was ended." in done.err
    if which is signal.SIGINT:  # as in a terminal: each rank is interrupted, and cleans up
        assert done.lines(0) == done.lines(1) == ["unwound"]


def test_a_failed_run_starts_again_and_knows_it(started, tmp_path):
    done = started("again", restarts=2)
    assert done.code == 0, done.err
    assert "Rank 0 failed first" in done.err
    assert "Starting again (1 of 2), from the last checkpoint." in done.err
    for seen in words(tmp_path, "seen"):
        variables = seen["environment"]
        assert variables["TRLX_HYBRID_RESUME"] == "1"
        assert variables["TRLX_HYBRID_RESTART_COUNT"] == "1"


def test_a_script_that_is_not_there_is_named_with_the_way_out(two_nodes, capfd, tmp_path):
    with pytest.raises(ScriptError, match=r"Node .* finds no script train.py in .*--working-dir"):
        launch(capfd, tmp_path, "train.py")
    with pytest.raises(ScriptError, match=r"has no folder /nowhere\..*--working-dir"):
        launch(capfd, "/nowhere", "train.py", restarts=3)


def test_more_than_there_is_is_refused(two_nodes, capfd, tmp_path):
    with pytest.raises(PlacementError, match="rank: 3 times 1 CPUs, each on one node \\(strategy strict_spread\\)"):
        launch(capfd, tmp_path, OBEDIENT, nodes=3)


def test_an_address_that_a_node_does_not_have_is_named():
    node = NodeActor.__new__(NodeActor)
    with pytest.raises(LaunchError, match=r"cannot listen at 192\.0\.2\.1, .*--node-ip-address"):
        node.free_port("192.0.2.1")  # which RFC 5737 gives to no machine


# --- what the error was -----------------------------------------------------------------------------------------------


def printed(code):
    """What Python prints to standard error when a script ends so."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('the reward is nan')", "ValueError: the reward is nan"),
        ("import sys; sys.exit('no data')", ""),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("try:\n  1 / 0\nexcept ZeroDivisionError as e:\n  raise KeyError('x') from e", "KeyError: 'x'"),
        ("class MyFault(Exception): pass\nraise MyFault", "MyFault"),
    ],
)
def test_the_last_words_of_a_rank_are_found(code, error):
    noise = "W1122 warning: Error: 3 of 4\n"
    found, trace = last_error(noise + printed(code) + noise)
    assert found == error
    assert bool(trace) == bool(error)
    if "from e" in code:
        assert sum(line.startswith("Traceback") for line in trace) == 2


@pytest.mark.timeout(60)  # a pattern that goes back and forth takes minutes
def test_all_that_is_kept_of_a_rank_may_be_one_line():
    assert last_error("A1" * 32_000 + " Error") == ("", [])


LOST = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:17",
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:2094, remote process exited or there was a network error",
    "RuntimeError: Rank 0 waited up to 2 s at the start of the weight sync for rank 2, which never entered it",
    "torch.distributed.DistBackendError: nothing that we know",
]
OWN = [
    "ValueError: reward function returned nan",
    "RuntimeError: CUDA out of memory while compiling: implicit success",
    "KeyError: 'connection'",
]


@pytest.mark.parametrize("error", [*LOST, *OWN])
def test_errors_about_a_lost_peer_are_told_from_a_ranks_own(error):
    assert bool(LOST_PEER.search(error)) == (error in LOST)
