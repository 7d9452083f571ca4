"""How the ranks of an engine find each other. Over two hosts: `test_two_hosts.py` of the Ray plugin."""

import os
import time

import pytest
from trlx_hybrid_vllm.rendezvous import address_towards, launcher_environment, told_when_late


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "", "no-such-host.invalid"])
def test_no_address_is_taken_towards_this_host_or_one_that_nobody_knows(host):
    assert address_towards(host) is None


def test_what_a_user_has_said_of_the_hosts_address_stays(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.7")
    with launcher_environment(1, 0, 2):
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
