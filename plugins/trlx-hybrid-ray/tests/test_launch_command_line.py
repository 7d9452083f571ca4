"""The command itself, in a process of its own: a cluster that it starts, one that it joins, and its own sudden end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import OBEDIENT, Segments, nothing_left

COMMAND = [sys.executable, "-m", "trlx_hybrid.cli", "launch", "--cpu"]


def start(folder, *arguments, **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= settings.pop("env", {})
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        **settings,
    )


def ranks_wait(folder, seconds=90):
    """Both of obedient.py's ranks have begun to."""
    deadline, marks = time.monotonic() + seconds, [folder / "waiting.0", folder / "waiting.1"]
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline, f"of {marks}, not all appeared"
        time.sleep(0.1)


@pytest.mark.slow
def test_one_line_on_one_machine(tmp_path):
    """A cluster of its own, gone with it; the home folder stays as it was."""
    home = tmp_path / "home"
    home.mkdir()
    segments = Segments()
    process = start(tmp_path, "--processes-per-node", "1", OBEDIENT, "look", str(tmp_path), env={"HOME": str(home)})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "Ray started at 127.0.0.1:" in err
    seen = json.loads((tmp_path / "seen.0").read_text())
    assert seen["argv"] == [OBEDIENT, "look", str(tmp_path)]
    assert list(home.iterdir()) == []
    assert nothing_left(str(tmp_path), segments) == []


@pytest.mark.slow
def test_ranks_end_when_the_launcher_is_killed(two_nodes, tmp_path):
    segments = Segments()
    joined = ["--address", two_nodes.address, "--token-file", str(two_nodes.token)]
    process = start(tmp_path, "--processes-per-node", "2", *joined, OBEDIENT, "wait", str(tmp_path))
    ranks_wait(tmp_path)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    process.communicate()
    assert nothing_left(str(tmp_path), segments, seconds=30) == []


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(two_nodes, tmp_path):
    """The whole foreground group gets SIGINT; ranks get it through their wardens, each once."""
    segments = Segments()
    joined = ["--address", two_nodes.address, "--token-file", str(two_nodes.token)]
    process = start(
        tmp_path, "--processes-per-node", "2", *joined, OBEDIENT, "wait", str(tmp_path), start_new_session=True
    )
    ranks_wait(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130, err
    assert out.count("unwound") == 2
    assert nothing_left(str(tmp_path), segments) == []


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["group", "everything"])
def test_sigterm_to_more_than_the_launcher(tmp_path, whom):
    """`timeout` sends it to the whole process group, batch systems to all processes of a job: Ray's own, too."""
    segments = Segments()
    process = start(tmp_path, "--processes-per-node", "2", OBEDIENT, "wait", str(tmp_path), start_new_session=True)
    ranks_wait(tmp_path)
    if whom == "group":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        launcher = psutil.Process(process.pid)
        for each in [*launcher.children(recursive=True), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Stopped by SIGTERM" in err
    assert nothing_left(str(tmp_path), segments) == []


@pytest.mark.slow
def test_as_a_job_of_ray(fresh_cluster, tmp_path):
    """`ray job submit --working-dir`: the files travel with the job, and its logs and its status are ours."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(Path(OBEDIENT).read_text())
    environment = {**os.environ}
    with fresh_cluster({"include_dashboard": True, "dashboard_host": "127.0.0.1"}) as cluster:
        import ray

        url = f"http://{ray._private.worker.get_dashboard_url()}"
        environment |= {name: os.environ[name] for name in os.environ if name.startswith("RAY_AUTH")}
        environment.pop("RAY_ADDRESS", None)
        entry = f"{sys.executable} -m trlx_hybrid.cli launch --cpu --processes-per-node 2 train.py"
        submit = [
            str(Path(sys.executable).parent / "ray"),
            "job",
            "submit",
            "--address",
            url,
            "--working-dir",
            str(source),
        ]
        for what, code in (("together", 0), ("leave", 3)):
            command = [*submit, "--", *entry.split(), what, str(tmp_path)]
            deadline = time.monotonic() + 60
            while True:
                done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
                if "No available agent" not in done.stderr or time.monotonic() > deadline:
                    break
                time.sleep(1)
            assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
            if code == 0:
                assert "[rank 0] line 999" in done.stdout
                assert "[rank 1] sum 3" in done.stdout
            else:
                assert "the script ended with exit code 3." in done.stdout
        assert cluster.address
