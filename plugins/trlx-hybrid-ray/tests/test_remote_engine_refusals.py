"""Remote engines that cannot be had, and settings that contradict each other: said at once, with the way out."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from trlx_hybrid import HybridConfig
from trlx_hybrid.errors import ComponentError, ConfigError
from trlx_hybrid.plugins.hookspecs import hookimpl
from trlx_hybrid_ray.engines.options import RemoteOptions
from trlx_hybrid_ray.engines.pool import reserved
from trlx_hybrid_ray.errors import PlacementError

sys.path.insert(0, str(Path(__file__).parent))
from remote_training import Trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 1000}, r"1e\+03 CPUs|1000 CPUs"),
        ({"gpus": 1, "replicas": 40}, r"40 GPUs are asked for, the cluster has 32"),
        ({"gpus": 1, "tensor_parallel_size": 2, "cpus": 0, "replicas": 17}, r"34 GPUs are asked for"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_table(session_cluster, tmp_path, options, message):
    with pytest.raises(PlacementError, match=message) as caught:
        Trained(tmp_path, HybridConfig(engine="remote", engine_options=options))
    assert "asked" in str(caught.value)
    assert "engine" in str(caught.value)
    assert "free GPUs" in str(caught.value)


@pytest.mark.parametrize(
    ("hybrid", "error", "message"),
    [
        ({"engine_options": {"replica": 2}}, ConfigError, "Did you mean 'replicas'"),
        ({"engine_options": {"replicas": 0}}, ConfigError, "at least one"),
        ({"engine_options": {"server": "vlm"}}, ComponentError, "Did you mean 'vllm'"),
        ({"engine_options": {"server_options": {"dtyp": "auto"}}}, ConfigError, "Did you mean 'dtype'"),
        ({"engine_options": {"server_options": {"enable_sleep_mode": True}}}, ComponentError, "do not sleep"),
        ({"engine_options": {"server_options": {"pipeline_parallel_size": 2}}}, ComponentError, "no pipeline stages"),
        ({"engine_options": {"tensor_parallel_size": 3}}, ComponentError, "does not divide the model's 4 attention"),
        ({"weights": "transfer", "weights_options": {"deadline": 0}}, ConfigError, "seconds above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_built(tmp_path, hybrid, error, message):
    with pytest.raises(error, match=message):
        Trained(tmp_path, HybridConfig(engine="remote", **hybrid))


class Silent:
    """Offers a server that says nothing of the ids that it keeps, and one that cannot say what it refuses."""

    @hookimpl
    def trlx_register(self, registry):
        registry.offer("server", "silent", lambda session, options: None)
        registry.offer("server", "broken", lambda session, options: None, refuses=lambda session, options: 1 / 0)


def test_a_server_that_fails_to_say_what_it_refuses_is_named(tmp_path):
    with pytest.raises(ComponentError, match=r"The server 'broken' .* failed in `refuses`: ZeroDivisionError"):
        Trained(tmp_path, HybridConfig(engine="remote", engine_options={"server": "broken"}), [Silent()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "silent"}, "server 'silent' does not say which ids it kept, and top_k=20 leaves some out"),
        (
            {"server_options": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}},
            "with speculative_config vLLM does not say which ids it kept, and top_k=20",
        ),
    ],
    ids=["a server of somebody else's", "speculation"],
)
def test_servers_that_cannot_say_what_they_kept_are_refused(tmp_path, options, message):
    with pytest.raises(ComponentError, match=message):
        Trained(tmp_path, HybridConfig(engine="remote", engine_options=options), [Silent()], top_k=20)


def test_rows_stay_in_flight_only_on_servers_whose_requests_can_be_interrupted(tmp_path):
    engine = {"engine": "remote", "engine_options": {"server": "silent"}}
    with pytest.raises(ComponentError, match="requests of server 'silent' cannot be interrupted"):
        Trained(tmp_path, HybridConfig(**engine, rollout_options={"max_staleness": 1}), [Silent()])


def test_engines_get_no_gpu_that_a_trainer_outside_of_ray_uses(two_nodes):
    plan = SimpleNamespace(ranks=2, gpus=1.0)
    node = two_nodes.nodes[0]
    trainers, engines = reserved(plan, RemoteOptions(replicas=2, tensor_parallel_size=2), {node: ["0", "1", "2"]})
    assert [trainers.gpus(rank) for rank in range(3)] == [("0",), ("1",), ("2",)]
    taken = [(engines.bundle(replica).node.id, gpu) for replica in range(2) for gpu in engines.gpus(replica)]
    assert len(set(taken)) == 4
    assert not {(node, gpu) for gpu in "012"} & set(taken)
    options = [engines.options(replica) for replica in range(2)]
    assert all(found["num_gpus"] == 2 and found["num_cpus"] == 2 for found in options)
    assert len({found["scheduling_strategy"].placement_group_bundle_index for found in options}) == 2


def test_an_engine_on_the_gpu_of_a_trainer_is_refused(two_nodes):
    """Ray gives the lowest GPUs first, and the trainers were told to use others."""
    plan, trainers = SimpleNamespace(ranks=1, gpus=1.0), {node: ["9"] for node in two_nodes.nodes}
    with pytest.raises(
        PlacementError, match=r"Ray gives an engine GPU 9 of node .*, which a trainer outside of Ray uses"
    ):
        reserved(plan, RemoteOptions(replicas=14), trainers)
    for placement in reserved(plan, RemoteOptions(replicas=30), {}):  # nothing stayed reserved
        placement.remove()
