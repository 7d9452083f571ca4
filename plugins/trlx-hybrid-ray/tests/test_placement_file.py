"""`trlx-hybrid launch --placement`: one file says where everything goes, and there it is."""

import argparse
import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launching import Segments, launch, nothing_left
from test_launch_command_line import LAUNCH, start
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.errors import PlacementError
from trlx_hybrid_ray.launch import _places, add_command, job_of
from trlx_hybrid_ray.placement import SET_ASIDE, PlacementRequest, reserve
from trlx_hybrid_ray.placement_file import told

SCRIPTS = Path(__file__).parent / "scripts"
PLACED = str(SCRIPTS / "placed.py")
ONE = "trainer: {gpus: 0}"


@pytest.fixture
def job(tmp_path):
    """Of a file with these lines, and of further options."""

    def of(lines, *options, script=PLACED):
        file = tmp_path / "places.yaml"
        file.write_text(lines)
        parser = argparse.ArgumentParser()
        add_command(parser.add_subparsers())
        return job_of(parser.parse_args(["launch", "--placement", str(file), *options, script]))

    return of


def settings(job):
    """What the helper that launches takes of it."""
    names = ("nodes", "processes_per_node", "gpus", "cpus_per_process", "only", "labels", "placement", "others")
    return {name: getattr(job, name) for name in names}


def mapped(text, name):
    """(node, GPU) of each worker by the launcher's map."""
    lines = re.findall(rf"^{name} [\d-]+ on node \S+ \((\w+)\), GPU (.*)$", text, re.MULTILINE)
    return [(node, gpu) for node, gpus in lines for gpu in gpus.split(", ")]


def test_every_part_is_where_the_map_says_that_was_printed_before_the_start(two_nodes, capfd, tmp_path, job):
    """Also where a rank has closed its part and opens it again."""
    here, there = two_nodes.nodes
    segments = Segments()
    wanted = job(
        f"trainer: {{replicas: 2, size: 2, gpus: 1, cpus: 0.5}}\n"
        f"reward judge: {{replicas: 2, gpus: 1, nodes: [{there}]}}\n"
        f"environment Counter: {{gpus: 1, cpus: 0.5, nodes: [{here[:8]}]}}\n"
    )
    done = launch(capfd, tmp_path, PLACED, tmp_path, **settings(wanted))
    assert done.code == 0, done.err[-4000:]
    first_words = done.err.index("[node")  # of a rank
    judges = mapped(done.err[:first_words], "reward judge")
    counters = mapped(done.err[:first_words], "environment Counter")
    assert len({*judges, *counters, *mapped(done.err, "rank")}) == 8 + 4 + 4
    assert {node for node, _ in judges} == {there[:6]}
    assert {node for node, _ in counters} == {here[:6]}
    for rank in range(4):
        found = json.loads((tmp_path / f"placed.{rank}").read_text())
        assert sorted(map(tuple, found["judges"])) == sorted(judges[2 * rank : 2 * rank + 2])
        assert found["again"] == found["judges"]
        assert list(map(tuple, found["counters"])) == counters[rank : rank + 1]
    assert nothing_left(str(tmp_path), segments) == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("reward jugde: {}", "sets aside 'reward jugde', and the run asks for 'reward judge'. Add `reward judge: "),
        ("reward judge: {}", r"sets aside 1 times 1 CPU for 'reward judge', and the run asks for 2 times 1 GPU, 1 CPU"),
    ],
)
def test_a_part_that_the_file_does_not_know_ends_the_run_with_the_line_to_write(
    two_nodes, capfd, tmp_path, job, lines, message
):
    wanted = job(f"{ONE}\n{lines}\n")
    done = launch(capfd, tmp_path, PLACED, tmp_path, **settings(wanted))
    assert done.code == 1
    last = done.err.strip().splitlines()[-1]
    assert "places.yaml " + message in last
    assert "reward judge: {replicas: 2, gpus: 1, cpus: 1}`." in last


def test_a_node_that_some_part_needs_is_left_to_it(two_nodes, job):
    """Ray would put the ranks on either, and leave the engine none of its GPUs."""
    for node in two_nodes.nodes * 2:
        wanted = job(f"trainer: {{size: 16, gpus: 1}}\nengine: {{gpus: 16, nodes: {node}}}\n")
        with ExitStack() as stack:
            ranks, engine = _places(wanted, 0, Shown(), stack)
            assert engine.bundles[0].node.id == node
            assert ranks.bundles[0].node.id != node


class Shown:
    """In the place of a printer."""

    def say(self, line):
        pass


@pytest.mark.parametrize("gpus", [0, 1 / 3])
def test_what_is_set_aside_is_given_once(two_nodes, monkeypatch, gpus):
    """Of a third, the line that is advised says 0.3333, which is what Ray counts."""
    request = PlacementRequest(name="reward judge", gpus=gpus)
    with reserve(PlacementRequest(name="reward judge", gpus=round(gpus, 4))) as owned:
        monkeypatch.setenv(SET_ASIDE, told([owned], 1, range(1), "places.yaml"))
        with reserve(request) as lent:
            assert lent.bundles == owned.bundles
            with pytest.raises(
                PlacementError, match=r"Two parts of the run ask for what --placement places\.yaml sets"
            ):
                reserve(request)
        with reserve(request) as again:
            assert again.bundles == owned.bundles


def test_too_much_is_refused_before_anything_starts(two_nodes, capfd, tmp_path, job, monkeypatch):
    """With who holds what; nothing stays reserved."""
    from ray.util import placement_group_table

    def in_a_moment(request):
        """What cannot be had is refused after the usual seconds; the ranks' places can."""
        return reserve(request, **{"deadline": 0.1} if request.name == "reward judge" else {})

    monkeypatch.setattr("trlx_hybrid_ray.launch.reserve", in_a_moment)
    wanted = job("trainer: {replicas: 2, size: 16, gpus: 1}\nreward judge: {gpus: 1}\n")
    with pytest.raises(PlacementError, match=r"reward judge: 32 GPUs are asked for, 0 of 32 are free"):
        launch(capfd, tmp_path, PLACED, tmp_path, **settings(wanted))
    assert all(group["state"] == "REMOVED" for group in placement_group_table().values())


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("- trainer", (), "write a line for each part of the run, as `engine: {gpus: 2}`"),
        ("engine: {gpus: 1}", (), "whether they have GPUs, as `trainer: {size: 8, gpus: 1}`"),
        ("trainer: {size: 8}", (), "whether they have GPUs, as `trainer: {size: 8, gpus: 1}`"),
        (f"{ONE}\nengine: {{gpu: 1}}", (), r"places.yaml: engine has no setting 'gpu'. Did you mean 'gpus'"),
        (f"{ONE}\nengine: {{gpus: '1'}}", (), "engine: gpus='1' is not a number of them"),
        (f"{ONE}\nengine: {{replicas: 1.5}}", (), "engine: replicas=1.5 is not a number of them"),
        (f"{ONE}\nengine: {{size: }}", (), "engine: size=None is not a number of them"),
        (f"{ONE}\nengine: {{labels: [a]}}", (), r"engine: labels=\['a'\] is not a mapping of labels"),
        (f"{ONE}\nengine: {{}}\nengine: {{gpus: 1}}", (), "places.yaml: engine is there twice"),
        (f"{ONE}\nrank: {{}}", (), "the ranks are called trainer here"),
        ("trainer: {gpus: 0, replicas: 0}", (), "trainer: 0 replicas of 1 are no workers"),
        ("trainer: {gpus: 2}", (), "trainer: gpus=2: a rank has one GPU, or none"),
        ("trainer: {gpus: 1, cpus: 0}", (), "trainer: cpus=0: a rank takes some"),
        ("trainer: {gpus: 1, strategy: pack}", (), "trainer: no strategy: each of its replicas is a node"),
        (ONE, ("--nodes", "2"), "--nodes and --placement .*places.yaml both say where ranks go"),
        (ONE, ("--cpu",), "--cpu and --placement .*places.yaml both say where ranks go"),
        ("trainer: {", (), r"places.yaml: while parsing a flow node"),
    ],
)
def test_files_that_cannot_be(job, lines, options, message):
    with pytest.raises(ConfigError, match=message):
        job(lines, *options)


@pytest.mark.slow
def test_a_run_with_engines_and_a_judge_from_the_command_line(two_nodes, tmp_path):
    segments = Segments()
    places = tmp_path / "places.yaml"
    places.write_text(
        "trainer: {size: 2, gpus: 0}\nengine: {replicas: 2, strategy: spread}\nreward digits: {cpus: 0.5}\n"
    )
    joined = ["--address", two_nodes.address, "--token-file", str(two_nodes.token)]
    script = [str(SCRIPTS / "remote_grpo.py"), str(tmp_path / "out"), "replicas=2", "steps=2", "judge=1"]
    process = start(tmp_path, "--placement", str(places), *joined, *script, command=LAUNCH)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-4000:]
    shown = err[: err.index("[node")] if "[node" in err else err
    for line in ("rank 0-1 on node", "engine 0 on node", "engine 1 on node", "reward digits 0-1 on node"):
        assert line in shown
    assert out.count(": rewards [") == 2
    assert nothing_left(str(tmp_path), segments) == []
