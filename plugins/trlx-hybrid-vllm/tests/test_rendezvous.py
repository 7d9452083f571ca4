"""How the ranks of an engine find each other. Over two hosts: `test_two_hosts.py` of the Ray plugin."""

import os
import time

import pytest
from trlx_hybrid_vllm import rendezvous
from trlx_hybrid_vllm.rendezvous import address_of_this_host, address_towards, launcher_environment, told_when_late

MASTER, OTHER = ("10.0.0.1", "10.0.0.1"), ("10.0.0.2", "10.0.0.1")
NAMED = ("127.0.1.1", "127.0.1.1")


@pytest.mark.parametrize(
    ("seen", "addresses"),
    [
        ([MASTER, OTHER], ["10.0.0.1", "10.0.0.2"]),
        ([NAMED, OTHER], ["10.0.0.1", "10.0.0.2"]),
        ([NAMED, NAMED], [None, None]),
        ([MASTER, MASTER], ["10.0.0.1", "10.0.0.1"]),
        ([MASTER, (None, None)], ["10.0.0.1", None]),
    ],
    ids=["addresses", "a name of its own", "one host by its name", "one host by its address", "an unknown name"],
)
def test_hosts_have_the_addresses_by_which_they_reach_each_other(monkeypatch, seen, addresses):
    """`seen`: of each rank, its own address towards MASTER_ADDR, and what it takes that for."""
    for rank, expected in enumerate(addresses):
        monkeypatch.setattr(rendezvous, "address_towards", lambda host, rank=rank: seen[rank])
        assert address_of_this_host(lambda _: [known for _, known in seen]) == expected


def test_no_address_is_found_towards_a_host_that_nobody_knows():
    assert address_towards("no-such-host.invalid") == (None, None)
    assert address_towards("127.0.0.1") == ("127.0.0.1", "127.0.0.1")


def test_what_a_user_has_said_of_the_hosts_address_stays(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.7")
    with launcher_environment(1, 0, 2, "192.0.2.1"):
        assert os.environ["VLLM_HOST_IP"] == "192.0.2.7"
    assert os.environ["VLLM_HOST_IP"] == "192.0.2.7"


def test_ranks_that_wait_for_each_other_too_long_are_told_of(caplog):
    for ranks in (1, 2):
        with told_when_late(ranks, seconds=0.05):
            deadline = time.monotonic() + (0.3 if ranks == 1 else 20)
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
        assert len(caplog.records) == ranks - 1
    assert "engine is not up after 0.05 s. Its 2 ranks wait for each other" in caplog.text
    with told_when_late(2, seconds=0.05):
        pass
    time.sleep(0.2)
    assert len(caplog.records) == 1
