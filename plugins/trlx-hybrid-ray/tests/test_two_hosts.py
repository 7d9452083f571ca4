"""Two hosts that are two: network namespaces with addresses, hostnames, shared memory and files of their own.

What simulated nodes cannot show, which share one address and one file system. They booted at different times, and the
second host's clock is an hour ahead for all Python there, Ray's own included. Needs root, for the namespaces.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import OBEDIENT, SCRIPTS
from test_launch_grpo import GRPO

from tests.support.fsdp import FSDP2_FILE

PICTURES = Path(__file__).parents[2] / "trlx-hybrid-reshard/tests/scripts/images.py"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
CPUS = (4, 8)
AHEAD = 3600
"""Seconds, the second host's clock. Linux has no namespace for the time of day, so it is the clock of Python alone."""
CLOCK = f"import time\ntime.time = lambda true=time.time: true() + {AHEAD}\n"
RAYS_PORTS = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "metrics-export")
"""That Ray would choose among those of everybody: a firewall lets these in, and its workers' (10002 to 19999)."""
RENDEZVOUS, EPHEMERAL = "20000-31999", "32768-60999"


def namespaces_allowed():
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    return tools and subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not namespaces_allowed(), reason="no namespaces for this user"),
]


@dataclass
class Host:
    """A host: processes that `run` starts see its network, hostname and mounts; `disk` is a folder of its own."""

    number: int
    keeper: subprocess.Popen
    disk: Path
    variables: dict

    @property
    def address(self):
        return ADDRESSES[self.number]

    def command(self, *words):
        time_of = f"--time=/proc/{self.keeper.pid}/ns/time_for_children"
        return ["nsenter", "--target", str(self.keeper.pid), "--net", "--uts", "--mount", time_of, *map(str, words)]

    def run(self, *words, **options):
        told = {"capture_output": True, "text": True, "env": self.variables, "timeout": 400, "cwd": "/"} | options
        return subprocess.run(self.command(*words), **told, check=False)

    @contextlib.contextmanager
    def blocked(self, ports):
        """Drop without a word what comes to these ports from the other host, as a firewall does.

        Other than what answers from Ray's own ports there: a firewall knows an answer, a rule does not.
        """
        coming = ["iif", "eth0", "ipproto", "tcp"]
        rules = [["pref", 9, *coming, "sport", "1-19999", "lookup", "local"]]
        rules += [["pref", 10, *coming, "dport", ports, "blackhole"]]
        for rule in rules:
            assert self.run("ip", "rule", "add", *rule).returncode == 0
        try:
            yield
        finally:
            for rule in rules:
                assert self.run("ip", "rule", "del", *rule).returncode == 0

    def ray(self, *words):
        done = self.run(sys.executable, "-m", "ray.scripts.scripts", *words)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def hosts():
    """Two hosts on one cable, a raylet on each."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    disk = folder / "disk"
    disk.mkdir()
    (folder / "token").write_text("0123456789abcdef" * 4)
    (folder / "sitecustomize.py").write_text(CLOCK)
    variables = {n: v for n, v in os.environ.items() if not n.startswith(("RAY_", "TRLX_"))}
    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    variables["GLOO_SOCKET_IFNAME"] = "eth0"  # or gloo looks up the hostname, which nobody here knows
    found = []
    try:
        for number in range(2):
            own = f"mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {disk}"
            script = f"hostname host{number} && {own} && ip link set lo up && echo up && exec sleep 3600"
            later = ["--time", "--monotonic", str(86400 * number), "--boottime", str(86400 * number)]
            command = ["unshare", "--net", "--uts", "--mount", *later, "sh", "-c", script]
            keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert keeper.stdout.readline() == "up\n"
            ahead = {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"} if number else {}
            found.append(Host(number, keeper, disk, variables | ahead))
        names = [f"trlx{os.getpid() % 10000}{end}" for end in "ab"]
        subprocess.run(["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]], check=True)
        for host, name in zip(found, names, strict=True):
            moved = ["ip", "link", "set", name, "netns", str(host.keeper.pid), "name", "eth0"]
            subprocess.run(moved, check=True)
            for words in (["addr", "add", f"{host.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                assert host.run("ip", *words).returncode == 0
            # After others, or the kernel takes what comes to its own addresses before it asks any other rule.
            assert host.run("sh", "-c", "ip rule add pref 100 lookup local && ip rule del pref 0").returncode == 0
        common = ["--object-store-memory", 80 << 20, "--disable-usage-stats"]
        for number, name in enumerate(RAYS_PORTS):
            common += [f"--{name}-port", 9000 + number]
        for host in found:
            joining = ["--head", "--port", PORT, "--include-dashboard", "false"]
            if host.number:
                joining = ["--address", f"{ADDRESSES[0]}:{PORT}"]
            own = ["--node-ip-address", host.address, "--num-cpus", CPUS[host.number]]
            own += [] if host.number else ["--temp-dir", folder / "0"]
            host.ray("start", *joining, *common, *own)
        yield found
    finally:
        for host in found:
            left = [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _same_network(int(pid), host)]
            for pid in left:
                if pid != host.keeper.pid:
                    _kill(pid)
            host.keeper.kill()
            host.keeper.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _same_network(pid, host):
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{host.keeper.pid}/ns/net")
    except OSError:
        return False


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)


def launch(host, *words, **options):
    head = ["--address", f"{ADDRESSES[0]}:{PORT}", "--nodes", 2, "--cpu", "--processes-per-node", 2]
    return host.run(sys.executable, "-m", "trlx_hybrid", "launch", *head, *words, cwd="/", **options)


def test_ranks_of_two_hosts_meet(hosts, tmp_path):
    done = launch(hosts[0], OBEDIENT, "look", tmp_path)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"seen.{rank}").read_text())["environment"] for rank in range(4)]
    assert {each["MASTER_ADDR"] for each in seen} == {ADDRESSES[0]}
    for address in ADDRESSES:
        assert f" on node {address} (" in done.stderr
    done = launch(hosts[0], OBEDIENT, "together", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 10") == 4


def test_a_script_that_only_one_host_has_is_refused_by_the_other(hosts):
    disk = hosts[0].disk
    assert hosts[0].run("sh", "-c", f"echo 'print(1)' > {disk}/train.py").returncode == 0
    done = hosts[0].run(
        "sh", "-c",
        f"cd {disk} && exec {sys.executable} -m trlx_hybrid launch --address {ADDRESSES[0]}:{PORT} --nodes 2 "
        "--cpu --processes-per-node 1 train.py",
    )  # fmt: skip
    assert done.returncode == 1
    assert f"Node host1 finds no script train.py in {disk}." in done.stderr
    assert "--working-dir" in done.stderr


def test_a_failure_on_the_other_host_is_named(hosts, tmp_path):
    started = time.monotonic()
    done = launch(hosts[0], OBEDIENT, "fail", tmp_path)
    assert done.returncode == 1
    assert f"Rank 3 failed first (node {ADDRESSES[1]} (" in done.stderr
    assert done.stderr.strip().endswith("ValueError: the reward is nan")
    assert time.monotonic() - started < 90


def test_a_launcher_on_the_second_host_drives_both(hosts, tmp_path):
    done = launch(hosts[1], OBEDIENT, "together", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 10") == 4


def across(host, *words, **options):
    return host.run(sys.executable, SCRIPTS / "across_hosts.py", f"{ADDRESSES[0]}:{PORT}", *words, **options)


def test_the_hosts_booted_at_different_times(hosts):
    first, second = (float(host.run("cat", "/proc/uptime").stdout.split()[0]) for host in hosts)
    assert second - first == pytest.approx(86400, abs=60)


def test_the_second_hosts_clock_is_ahead(hosts):
    words = (sys.executable, "-c", "import time; print(time.time())")
    first, second = (float(host.run(*words).stdout) for host in hosts)
    assert second - first == pytest.approx(AHEAD, abs=60)


def test_workers_of_two_hosts_form_a_process_group(hosts):
    done = across(hosts[0], "group", 60)
    assert done.returncode == 0, done.stderr
    assert {host for _, host in ast.literal_eval(done.stdout)} == {"host0", "host1"}
    assert {total for total, _ in ast.literal_eval(done.stdout)} == {28.0}


def test_a_trainer_samples_from_an_engine_on_the_other_host(hosts):
    done = across(hosts[0], "engine", 60, hosts[0].disk)
    assert done.returncode == 0, done.stderr
    assert f"trained on host0 with an engine at {ADDRESSES[1]}" in done.stdout


def test_one_engine_over_both_hosts_trains(hosts, tmp_path):
    """There is no route to the internet, by which vLLM would look for the address where its ranks meet."""
    (tmp_path / "accelerate.yaml").write_text(json.dumps(FSDP2_FILE))
    own = ["--processes-per-node", 1, "--config_file", tmp_path / "accelerate.yaml"]
    done = launch(hosts[0], *own, GRPO, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads((tmp_path / f"report.{rank}").read_text()) for rank in range(2)]
    assert reports[0]["logs"] == reports[1]["logs"]
    assert all(report["sharded"] and report["weights"] == "reshard" for report in reports)


def test_a_model_that_sees_images_is_served_by_one_engine_over_both(hosts, tmp_path):
    """Qwen2.5-VL's shape, FSDP2 and TP=4, the case of OpenRLHF's issue 958. Run by `make test-vision`."""
    pytest.importorskip("torchvision", reason="the processors of vision-language models need torchvision")
    done = launch(hosts[0], PICTURES, tmp_path, "qwen2_5_vl", timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    for report in reports:
        assert report["sharded"]
        assert [sync["weights"] for sync in report["syncs"]] == ["reshard"] * 3
        assert all(sync["differing"] == [] and sync["gap"] < 1e-5 for sync in report["syncs"])
        assert all(log["sampling/sampling_logp_difference/max"] < 1e-5 for log in report["logs"])


def test_a_head_behind_a_firewall_is_told_at_once(hosts):
    started = time.monotonic()
    with hosts[0].blocked(PORT + 1):
        done = hosts[1].run(
            sys.executable, "-m", "trlx_hybrid", "launch", "--address", f"{ADDRESSES[0]}:{PORT + 1}", "--nodes", 2,
            "--cpu", "--processes-per-node", 1, OBEDIENT, "wait", hosts[0].disk,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"No Ray cluster answered at {ADDRESSES[0]}:{PORT + 1} within 5" in done.stderr
    assert "(timed out). Start one with" in done.stderr
    assert time.monotonic() - started < 30


def test_a_launch_names_the_rendezvous_port_that_a_firewall_drops(hosts, tmp_path):
    started = time.monotonic()
    with hosts[0].blocked(RENDEZVOUS):
        done = launch(hosts[0], OBEDIENT, "together", tmp_path)
    assert done.returncode == 1
    expected = rf"Node {ADDRESSES[1]} \(.*\) does not reach port \d+ of {ADDRESSES[0]}, .*: timed out"
    assert re.search(expected, done.stderr)
    assert time.monotonic() - started < 60


def last_words(text):
    """The error that a traceback ends with, before the sections of the documentation."""
    return [line for line in text.strip().splitlines() if not line.startswith("See docs/")][-1]


def test_a_worker_group_names_the_port_that_a_firewall_drops(hosts):
    started = time.monotonic()
    with hosts[0].blocked(EPHEMERAL):
        done = across(hosts[0], "group", 120)
    assert done.returncode == 1
    last = last_words(done.stderr)
    assert re.search(rf"at {ADDRESSES[1]}, .* does not reach port \d+ of {ADDRESSES[0]}, .*: timed out", last)
    assert time.monotonic() - started < 90


def test_a_weight_sync_names_the_port_that_a_firewall_drops(hosts):
    """Most of the time goes by before: the engine starts."""
    with hosts[0].blocked(EPHEMERAL):
        done = across(hosts[0], "engine", 600, hosts[0].disk, timeout=600)
    assert done.returncode == 1
    last = last_words(done.stderr)
    assert re.search(rf"SyncError: .* does not reach port \d+ of {ADDRESSES[0]}, .*: timed out", last)


def test_a_cable_that_is_cut_is_a_node_that_says_nothing(hosts, tmp_path):
    """Last: the cluster does not recover from it."""
    process = subprocess.Popen(
        hosts[0].command(
            sys.executable, "-m", "trlx_hybrid", "launch", "--address", f"{ADDRESSES[0]}:{PORT}", "--nodes", "2",
            "--cpu", "--processes-per-node", "1", OBEDIENT, "wait", tmp_path,
        ),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=hosts[0].variables, cwd="/",
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not all((tmp_path / f"waiting.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    cut = time.monotonic()
    assert hosts[1].run("ip", "link", "set", "eth0", "down").returncode == 0
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert f"Node {ADDRESSES[1]} (" in err
    assert "was lost, with rank 1: no sign of life for 10 s." in err
    assert time.monotonic() - cut < 40
