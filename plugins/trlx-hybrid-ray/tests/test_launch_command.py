"""What is typed: options before the script are the launcher's, what follows is the script's; errors come before Ray."""

import argparse

import pytest
from trlx_hybrid.commands.main import main
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.launch import add_command, job_of


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def job(*arguments):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    return job_of(parser.parse_args(["launch", *arguments]))


def test_options_after_the_script_are_the_scripts(script, tmp_path):
    found = job("--nodes", "2", "--gpus-per-node", "4", "--restart", "3", script, "--nodes", "7", "--", "-x", "--debug")
    assert (found.nodes, found.processes_per_node, found.world, found.gpus, found.restarts) == (2, 4, 8, True, 3)
    assert found.arguments == ("--nodes", "7", "--", "-x", "--debug")
    assert (found.script, found.folder, found.debug, found.address) == ("train.py", str(tmp_path), False, None)


def test_a_job_of_ray_joins_its_cluster(script, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert job("--cpu", "--processes-per-node", "2", script).address == "10.0.0.1:6379"
    assert job("--cpu", "--processes-per-node", "2", "--address", "auto", script).address == "auto"


def test_nodes_may_be_named(script):
    found = job("--gpus-per-node", "1", "--node", "10.0.0.1", "--node", "10.0.0.2", script)
    assert (found.nodes, found.request.nodes) == (2, ("10.0.0.1", "10.0.0.2"))
    assert job("--gpus-per-node", "1", "--nodes", "1", "--node", "10.0.0.1", "--node", "10.0.0.2", script).nodes == 1


def test_arguments_of_accelerate_are_passed_on(script):
    given = ("--accelerate", "mixed_precision=bf16", "--accelerate", "use_fsdp")
    assert job("--gpus-per-node", "1", *given, script).settings == ("--mixed_precision", "bf16", "--use_fsdp")


def test_arguments_of_accelerate_that_are_this_commands_are_refused_however_they_are_spelt(script, capsys):
    given = ["--accelerate=--num-machines=3"]
    assert main(["launch", "--cpu", "--processes-per-node", "1", *given, script]) == 1
    first, _ = capsys.readouterr().err.splitlines()
    assert first == "error: --accelerate num_machines: set by trlx-hybrid launch. Use --nodes, or --placement."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "--gpus-per-node N, or --cpu --processes-per-node N"),
        (["--cpu", "--gpus-per-node", "2", "train.py"], "--cpu and --gpus-per-node exclude each other."),
        (["--cpu", "train.py"], "--cpu needs --processes-per-node N"),
        (["--gpus-per-node", "2", "--processes-per-node", "2", "train.py"], "--processes-per-node needs --cpu"),
        (["--gpus-per-node", "0", "train.py"], "--gpus-per-node 0: at least one"),
        (["--nodes", "0", "--gpus-per-node", "1", "train.py"], "--nodes 0: at least one"),
        (["--gpus-per-node", "1", "--restart", "-1", "train.py"], "--restart -1"),
        (["--gpus-per-node", "1", "trian.py"], "trian.py: no such file (working directory /"),
        (["--gpus-per-node", "1", "--config_file", "none.yaml", "train.py"], "none.yaml: no such file"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(script, arguments, message):
    with pytest.raises(ConfigError) as refused:
        job(*arguments)
    assert message in str(refused.value)


def test_the_command_is_there_and_wrong_options_end_with_one_line(script, capsys):
    assert main(["launch", "--cpu", script]) == 1
    assert capsys.readouterr().err.startswith("error: --cpu needs")
