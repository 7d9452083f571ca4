"""`trlx-hybrid doctor --ray`: on a real cluster, and what it says of nodes that are not fit."""

import argparse
from dataclasses import replace

import pytest
from trlx_hybrid.commands.main import main
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray import doctor
from trlx_hybrid_ray.doctor import Facts, differences, shortages, steps, tensor_parallel
from trlx_hybrid_ray.placement import Node

FIT = Facts(
    versions={"python": "3.11.9", "ray": "2.60.0", "torch": "2.13.0"}, gpus=8, shared_memory=64 << 30, open_files=65536
)
NODE = Node(id="01" * 28, address="10.0.0.1", cpus=64, gpus=8, free_cpus=64, free_gpus=8)
OTHER = replace(NODE, id="02" * 28, address="10.0.0.2")


@pytest.mark.slow
def test_the_command_examines_a_cluster_and_raises_tp_until_it_breaks(two_nodes, disconnected, capsys, monkeypatch):
    """Two ranks work; 64 are more than there are GPUs."""
    monkeypatch.setattr("trlx_hybrid_ray.doctor.steps", lambda largest: [2, largest])
    with disconnected():
        status = main(["doctor", "--ray", two_nodes.address, "--token-file", str(two_nodes.token), "--tp", "64"])
    out = capsys.readouterr().out
    assert f"ray        Ray joined at {two_nodes.address}, namespace trlx-" in out
    assert "security   ports answer this machine only, token authentication is on" in out
    assert "share an address: fit for tests; vLLM's Ray executor refuses it" in out
    for node in two_nodes.nodes:
        assert f"node       127.0.0.1 ({node[:6]})  32 CPUs, 16 GPUs" in out
    assert "ray 2.60.0" in out
    assert "nodes      a process group of 2 ranks works over 2 nodes: gloo, 8 MiB summed in" in out
    assert "tp         a process group of 2 ranks works: gloo, 8 MiB summed in" in out
    assert "problem    tp: 64 ranks fail at placement: tp: 64 GPUs are asked for, the cluster has 32." in out
    assert status == 1


@pytest.mark.slow
def test_a_step_that_breaks_names_the_place_and_the_rank(two_nodes):
    """NCCL without a GPU: the processes start, and the process group cannot be formed."""
    (finding,) = tensor_parallel(2, backend="nccl")
    assert finding.problem
    assert "2 ranks fail at the process group (rendezvous at 127.0.0.1:" in finding.text
    assert "rank " in finding.text
    assert " on 127.0.0.1 (" in finding.text
    assert "GPU " in finding.text


def test_steps_double_up_to_what_was_asked_for():
    assert steps(8) == [2, 4, 8]
    assert steps(6) == [2, 4, 6]
    assert steps(2) == [2]
    with pytest.raises(ConfigError, match="--tp 1: tensor parallelism needs at least 2 ranks"):
        steps(1)


def test_a_fit_node_lacks_nothing():
    assert list(shortages(NODE, FIT)) == []
    assert list(shortages(NODE, replace(FIT, gpus=None))) == []
    assert list(differences({NODE: FIT, OTHER: FIT})) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 4}, "has 4 GPUs, but Ray counts 8. Start it with --num-gpus 4"),
        ({"gpus": "exit code 9: no driver"}, "`nvidia-smi -L` fails with exit code 9: no driver. Mend the driver"),
        ({"shared_memory": 64 << 20}, "64 MiB of shared memory.*--shm-size"),
        ({"open_files": 1024}, "1024 open files: `ulimit -n 65536`"),
    ],
)
def test_what_a_node_lacks_is_said_with_the_way_out(change, message):
    (finding,) = shortages(NODE, replace(FIT, **change))
    assert finding.problem
    import re

    assert re.search(message, finding.text)


def test_a_tool_of_the_driver_that_fails_is_no_node_without_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor.own_facts().gpus == "exit code 9: NVIDIA-SMI has failed"


def test_versions_that_differ_name_the_nodes():
    old = replace(FIT, versions={"python": "3.11.2", "ray": "2.59.0"})
    texts = [finding.text for finding in differences({NODE: FIT, OTHER: old})]
    assert texts == [
        "ray differs: 2.59.0 on 10.0.0.2 (020202); 2.60.0 on 10.0.0.1 (010101). Install the same everywhere",
        "torch differs: 2.13.0 on 10.0.0.1 (010101); not installed on 10.0.0.2 (020202). Install the same everywhere",
    ]


def test_options_without_ray_are_refused():
    parser = argparse.ArgumentParser()
    doctor.add_options(parser)
    assert doctor.findings(parser.parse_args([])) is None
    with pytest.raises(ConfigError, match="--tp needs --ray"):
        doctor.findings(parser.parse_args(["--tp", "4"]))
    with pytest.raises(ConfigError, match="--token-file needs --ray"):
        doctor.findings(parser.parse_args(["--token-file", "t"]))
