"""Clusters of one's own: who can talk to them, what they leave behind, and how they are joined."""

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray import token
from trlx_hybrid_ray.cluster import ADDRESS, NAMESPACE, connect
from trlx_hybrid_ray.errors import ClusterError

WATCHED = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", ADDRESS, NAMESPACE)


def elsewhere(code, **environment):
    """What a process prints that is no child of the run: its own home, and none of our variables."""
    own = {k: v for k, v in os.environ.items() if k not in WATCHED} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=own, timeout=120)
    return (done.stdout + done.stderr).strip()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An empty home folder for this process and its children."""
    before, folder = os.environ.get("HOME"), tmp_path_factory.mktemp("home")
    os.environ["HOME"] = str(folder)
    yield folder
    os.environ.pop("HOME")
    if before is not None:
        os.environ["HOME"] = before


@pytest.fixture(scope="module")
def cluster(home, disconnected, others):
    """A cluster that `connect` started."""
    with disconnected(), connect(cpus=2, gpus=1, namespace="run", object_store_memory=80 << 20) as found:
        yield found


@pytest.fixture(scope="module")
def others():
    """Where this process and its children listened before the cluster was started: other tests leave some."""
    return listening()


def listening():
    own = psutil.Process()
    processes = {p.pid for p in [own, *own.children(recursive=True)]}
    return {c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in processes}


def test_everything_listens_on_this_machine_only(cluster, others):
    found = listening() - others
    assert len(found) > 5
    assert {address.ip.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}
    assert cluster.address.startswith("127.0.0.1:")


def test_the_token_is_the_owners_and_nothing_is_written_to_the_home(cluster, home):
    assert stat.S_IMODE(cluster.token.stat().st_mode) == 0o600
    assert stat.S_IMODE(cluster.token.parent.stat().st_mode) == 0o700  # else another user puts a token in its place
    assert len(cluster.token.read_text()) == 64
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(cluster.token)
    assert list(home.iterdir()) == []


def test_a_process_with_the_token_joins_and_one_without_is_refused(cluster, tmp_path):
    connect_ = "from trlx_hybrid_ray.cluster import connect\n"
    join = connect_ + f"with connect({cluster.address!r}, token_file=%r) as c: print(c)"
    with_it = elsewhere(join % str(cluster.token))
    assert f"Ray joined at {cluster.address}, namespace trlx-" in with_it
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    once = {"RAY_gcs_server_port_wait_time_s": "1"}
    assert "refused our token, or we showed none" in elsewhere(join % str(wrong), **once)
    assert "token_file=, or --token-file" in elsewhere(join % None, **once)


def test_what_was_joined_keeps_running(cluster):
    import ray

    join = f"from trlx_hybrid_ray.cluster import connect\nwith connect({cluster.address!r}, token_file=%r): pass"
    assert elsewhere(join % str(cluster.token)) == ""
    assert ray.get(ray.remote(num_cpus=0)(lambda: os.getpid()).remote(), timeout=60) != os.getpid()


def test_a_second_connection_of_one_process_is_refused(cluster):
    with pytest.raises(ClusterError, match=f"already connected to the Ray cluster at {cluster.address}"), connect():
        pass


def test_pretended_gpus_are_shown_to_actors(cluster):
    import ray

    look = ray.remote(num_gpus=1, num_cpus=0)(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    assert ray.get(look.remote(), timeout=60) == "0"


@pytest.mark.slow
def test_a_cluster_that_was_started_has_no_idle_worker_and_leaves_nothing(home):
    """In a process of its own: what it started, wrote and set is gone after the context."""
    code = """
import os, psutil
from trlx_hybrid_ray.cluster import connect
class Worker:
    def pid(self):
        return os.getpid()
before = dict(os.environ)
with connect(cpus=4, gpus=0, object_store_memory=80 << 20) as c:
    import ray
    worker = ray.get(ray.remote(num_cpus=0)(Worker).remote().pid.remote())
    children = psutil.Process().children(recursive=True)
    assert len(children) >= 3 and c.started and c.dashboard is None
    commands = {child.pid: " ".join(child.cmdline()[:3]) for child in children}
    workers = {pid for pid, words in commands.items() if "default_worker.py" in words or "ray::IDLE" in words}
    assert workers <= {worker}, commands
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
gone, alive = psutil.wait_procs(children, timeout=60)
print("alive", alive, "token", c.token.exists(), "folder", c.token.parent.exists())
"""
    assert elsewhere(code).splitlines()[-1] == "alive [] token False folder False"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:{free}", "No Ray cluster answered at 127.0.0.1:.* within [0-9]\\.[0-9] s .*`ray start --head`"),
        ("ray://127.0.0.1:10001", "is no address of a Ray cluster.*not that of the dashboard"),
        ("somewhere", "is no address of a Ray cluster"),
    ],
)
def test_an_address_where_nobody_answers(address, message, monkeypatch):
    monkeypatch.setattr("trlx_hybrid_ray.cluster.REFUSED_SECONDS", 0.2)
    with socket.socket() as kept:  # taken, so that nobody else listens there meanwhile
        kept.bind(("127.0.0.1", 0))
        free = kept.getsockname()[1]
        with pytest.raises(ClusterError, match=message), connect(address.format(free=free)):
            pass


@pytest.mark.parametrize(
    ("says", "message"),
    [(b"", "takes connections and says nothing for 5 s"), (b"HTTP/1.1 400 Bad Request", "is not the head of a Ray")],
)
def test_a_port_of_somebody_else_is_told_from_a_head(says, message):
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def accept():
            connection, _ = server.accept()
            connection.sendall(says)
            kept.append(connection)

        threading.Thread(target=accept, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(ClusterError, match=message), connect(f"127.0.0.1:{server.getsockname()[1]}"):
            pass
        assert time.monotonic() - started < 10


def test_localhost_is_this_machine(cluster):
    port = cluster.address.rpartition(":")[2]
    join = "from trlx_hybrid_ray.cluster import connect\nwith connect('localhost:%s', token_file=%r) as c: print(c)"
    assert f"Ray joined at 127.0.0.1:{port}" in elsewhere(join % (port, str(cluster.token)))


def test_settings_of_a_new_cluster_are_refused_for_a_running_one():
    refused = pytest.raises(
        ConfigError, match=r"gpus= is of a cluster that is started; the one at 10\.0\.0\.1:6379 runs"
    )
    with refused, connect("10.0.0.1:6379", gpus=8):
        pass


def test_a_token_file_that_is_none(tmp_path):
    with pytest.raises(ClusterError, match="holds no token"), token.presented(tmp_path / "absent", everywhere=False):
        pass


def test_the_users_own_token_is_found_where_ray_looks(tmp_path):
    assert not token.given({"HOME": str(tmp_path)})
    Path(tmp_path / ".ray").mkdir()
    Path(tmp_path / ".ray" / "auth_token").write_text("secret")
    assert token.given({"HOME": str(tmp_path)})
    assert token.given({"RAY_AUTH_TOKEN": "secret"})


GIVES_UP_ONCE = """
import pathlib, sys
given_up = pathlib.Path(__file__).with_name("gave up")
if "trlx_hybrid_ray.cluster" in sys.orig_argv and not given_up.exists():
    given_up.touch()
    sys.exit("Exception: The current node timed out during startup. This could happen because some of the raylet ...")
"""


def test_a_driver_pauses_between_questions_for_errors(cluster, monkeypatch):
    """Without the head, each question is answered at once, with nothing."""
    from ray._private.worker import global_worker, listen_error_messages

    assert global_worker.listener_thread.is_alive()
    paused = global_worker.gcs_error_subscriber  # what Ray's thread asks from now on
    asked, waits, stopped = [], [], threading.Event()

    def poll():
        asked.append(1)
        return None, None

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            stopped.set()

    monkeypatch.setattr(paused, "_subscriber", SimpleNamespace(poll=poll, subscribe=lambda: None))
    monkeypatch.setattr(paused, "_stopped", SimpleNamespace(wait=wait))
    worker = SimpleNamespace(gcs_error_subscriber=paused, current_job_id=global_worker.current_job_id)
    listen_error_messages(worker, stopped)
    assert len(asked) == 3
    assert min(waits) > 0


def test_a_busy_host_has_longer_to_start_a_cluster(home, disconnected, monkeypatch, tmp_path):
    """Ray takes some two seconds to start, so it is late after one second, except where the host has other work. There
    a start is tried again that Ray itself gave up, as it does after 30 s."""
    monkeypatch.setattr("trlx_hybrid_ray.cluster.START_SECONDS", 1.0)
    with disconnected():
        monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        with pytest.raises(ClusterError, match="did not start within 1 s"), connect(cpus=1, namespace="late"):
            pass
        monkeypatch.setattr(os, "getloadavg", lambda: (1e9, 0.0, 0.0))
        # This host may be busy, too.
        monkeypatch.setattr("trlx_hybrid.interprocess.deadline.BUSIEST", 200.0)
        (tmp_path / "sitecustomize.py").write_text(GIVES_UP_ONCE)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with connect(cpus=1, namespace="slow") as found:
            assert found.address
    assert (tmp_path / "gave up").exists()
