"""The command itself, in a process of its own: a cluster that it starts, one that it joins, and its own sudden end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import OBEDIENT, Segments, nothing_left, shells_environment

LAUNCH = [sys.executable, "-m", "trlx_hybrid", "launch"]
COMMAND = [*LAUNCH, "--cpu"]


def start(folder, *arguments, command=COMMAND, **settings):
    environment = shells_environment() | settings.pop("env", {})
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        **settings,
    )


@pytest.fixture
def segments():
    return Segments()


@pytest.fixture
def command(segments, tmp_path):
    """Starts two ranks of obedient.py with a word; nothing of them may be left in the end.

    Asked for after `joined`, so that this is seen before the cluster is cleaned up.
    """

    def on(joined, what, **settings):
        return start(tmp_path, "--processes-per-node", "2", *joined, OBEDIENT, what, str(tmp_path), **settings)

    yield on
    assert nothing_left(str(tmp_path), segments) == []


@pytest.fixture
def joined(two_nodes):
    """Options that join the cluster."""
    return ["--address", two_nodes.address, "--token-file", str(two_nodes.token)]


def ranks_wait(folder, mark="waiting", seconds=240):
    """Both of obedient.py's ranks have begun to."""
    deadline, marks = time.monotonic() + seconds, [folder / f"{mark}.{rank}" for rank in range(2)]
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline, f"of {marks}, not all appeared"
        time.sleep(0.1)


@pytest.mark.slow
def test_one_line_on_one_machine(segments, tmp_path):
    """A cluster of its own, gone with it; the home folder stays as it was."""
    home = tmp_path / "home"
    home.mkdir()
    process = start(tmp_path, "--processes-per-node", "1", OBEDIENT, "look", str(tmp_path), env={"HOME": str(home)})
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "Ray started at 127.0.0.1:" in err
    seen = json.loads((tmp_path / "seen.0").read_text())
    assert seen["argv"] == [OBEDIENT, "look", str(tmp_path)]
    assert list(home.iterdir()) == []
    assert nothing_left(str(tmp_path), segments) == []


@pytest.mark.slow
def test_ranks_end_when_the_launcher_is_killed(joined, command, segments, tmp_path):
    process = command(joined, "wait")
    ranks_wait(tmp_path)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.communicate()
    assert nothing_left(str(tmp_path), segments) == []


@pytest.mark.slow
def test_a_cluster_ends_with_the_launcher_that_started_it(command, tmp_path):
    """Its processes, the actors and reapers of its nodes, and its folder with the token."""
    process = command([], "wait")
    ranks_wait(tmp_path)
    below = psutil.Process(process.pid).children(recursive=True)
    (gcs,) = [each for each in below if "gcs_server" in each.name()]
    (logs,) = [word.partition("=")[2] for word in gcs.cmdline() if word.startswith("--log_dir=")]
    folder = Path(*Path(logs).parts[:3])  # /tmp/ray-…
    assert (folder / "token").exists()
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(joined, command, tmp_path):
    """The whole foreground group gets SIGINT; ranks get it from their node's actor, each once."""
    process = command(joined, "wait", start_new_session=True)
    ranks_wait(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.count("unwound") == 2


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_ranks_that_ignore_signals_are_killed(joined, command, tmp_path, presses):
    """At once with the second Ctrl-C, after 8 s without."""
    process = command(joined, "stubborn")
    ranks_wait(tmp_path)
    pressed = time.monotonic()
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(1)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Once more kills them at once" in err
    assert time.monotonic() - pressed < (30 if presses == 1 else 12)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["group", "everything", "ranks first"])
def test_sigterm_to_more_than_the_launcher(command, tmp_path, whom):
    """`timeout` sends it to the whole process group, batch systems to all processes of a job: Ray's own, too."""
    process = command([], "wait", start_new_session=True)
    ranks_wait(tmp_path)
    if whom == "group":
        os.killpg(process.pid, signal.SIGTERM)
    elif whom == "ranks first":
        for rank in range(2):
            os.kill(json.loads((tmp_path / f"waiting.{rank}").read_text())["pid"], signal.SIGTERM)
        time.sleep(0.7)
        process.terminate()
    else:
        launcher = psutil.Process(process.pid)
        for each in [*launcher.children(recursive=True), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Stopped by SIGTERM" in err


@pytest.mark.slow
def test_a_launcher_that_is_suspended_ends_no_training(joined, command, tmp_path):
    """Ctrl-Z, or a terminal that blocks, for two minutes, while ranks print more than any pipe holds."""
    process = command(joined, "count")
    ranks_wait(tmp_path, "counting")
    process.send_signal(signal.SIGSTOP)
    time.sleep(125)
    assert [len(list(tmp_path.glob(f"counted.{rank}"))) for rank in range(2)] == [1, 1], "they went on to their end"
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    for rank in range(2):
        for what in ("line", "long"):
            assert [f"[rank {rank}] {what} {number}" in out for number in range(100)] == [True] * 100


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["| head -1", "> /dev/full"])
def test_output_that_nobody_takes_ends_no_run(joined, tmp_path, reader):
    line = f"{' '.join(COMMAND)} --processes-per-node 2 {' '.join(joined)} {OBEDIENT} together {tmp_path} {reader}"
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("standard output takes no more") == 1
    assert "[rank 1] error 999" in done.stderr


@pytest.mark.slow
def test_a_terminal_that_blocks_keeps_nothing_reserved(joined, command, tmp_path):
    """Nobody reads, and the last words do not fit: what the run had is given back all the same."""
    from ray.util import placement_group_table

    process = command(joined, "flood", pipesize=4096)
    ranks_wait(tmp_path, "flooded")

    def reserved():
        groups = placement_group_table().values()
        return [g for g in groups if f"pid {process.pid} of" in g["name"] and g["state"] != "REMOVED"]

    deadline = time.monotonic() + 60
    while (held := reserved()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert process.poll() is None
    assert held == []
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3, err
    assert [err.count(f"line {number}\n") for number in (0, 999)] == [2, 2]
    assert err.strip().endswith("the script ended with exit code 3.")


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
def test_the_end_comes_without_the_clusters_head(command, tmp_path, which):
    """Ray's client waits a minute for it, or for ever."""
    process = command([], "wait", start_new_session=True)
    ranks_wait(tmp_path)
    (head,) = [p for p in psutil.Process(process.pid).children(recursive=True) if "gcs_server" in p.name()]
    head.send_signal(which)
    if which == signal.SIGSTOP:  # training does not need it, so nobody ends it
        time.sleep(5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    if which == signal.SIGSTOP:
        assert process.returncode == 130, err
    else:
        assert process.returncode == 1, err
        assert re.search(
            r"The cluster's head, 127\.0\.0\.1:\d+, has accepted no connection for 15 s|Node .* was lost", err
        )
    assert not head.is_running() or head.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("where", ["clusters of their own", "one cluster"])
def test_two_launches_at_once(request, tmp_path, where):
    joined = request.getfixturevalue("joined") if where == "one cluster" else []
    processes = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        arguments = ["--processes-per-node", "2", *joined, OBEDIENT, "together", str(tmp_path / name)]
        processes.append(start(tmp_path, *arguments))
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "[rank 1] sum 3" in out


@pytest.fixture
def jobs(fresh_cluster, tmp_path):
    """`ray job` on a cluster with a dashboard, with a word and its arguments; and its `submit` of a launch."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(Path(OBEDIENT).read_text())
    with fresh_cluster({"include_dashboard": True, "dashboard_host": "127.0.0.1"}):
        import ray

        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        ray_command = [str(Path(sys.executable).parent / "ray"), "job"]
        address = ["--address", f"http://{ray._private.worker.get_dashboard_url()}"]

        def job(word, *arguments):
            command, deadline = [*ray_command, word, *address, *arguments], time.monotonic() + 120
            while True:
                done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
                if "No available agent" not in done.stderr or time.monotonic() > deadline:
                    return done
                time.sleep(1)

        def submit(*options, what):
            entry = f"{sys.executable} -m trlx_hybrid launch --cpu --processes-per-node 2 train.py {what} {tmp_path}"
            return job("submit", "--working-dir", str(source), *options, "--", *entry.split())

        yield job, submit


@pytest.mark.slow
def test_as_a_job_of_ray(jobs):
    """`ray job submit --working-dir`: the files travel with the job, and its logs and its status are ours."""
    _, submit = jobs
    done = submit(what="together")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank 0] line 999" in done.stdout
    assert "[rank 1] sum 3" in done.stdout
    done = submit(what="leave")
    assert done.returncode != 0, done.stdout
    assert "the script ended with exit code 3." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", ["wait", "stubborn"])
def test_a_job_that_is_stopped(jobs, segments, tmp_path, what):
    """`ray job stop`: ranks have the time that Ray gives a job, three seconds, then whoever is left is killed."""
    job, submit = jobs
    done = submit("--submission-id", "mine", "--no-wait", what=what)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks_wait(tmp_path)
    done = job("stop", "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert nothing_left(str(tmp_path), segments) == []
    ranks = [json.loads((tmp_path / f"waiting.{rank}").read_text())["pid"] for rank in range(2)]
    deadline = time.monotonic() + 30
    while (alive := [pid for pid in ranks if psutil.pid_exists(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive == []
    assert "SIGTERM: ending all ranks" in job("logs", "mine").stdout  # and what comes later than 3 s is not said
