"""Run on one of two hosts by tests: a driver of the cluster at the address that the first argument gives."""

import socket
import sys
from pathlib import Path

import ray
import torch
from trlx_hybrid_ray.cluster import connect
from trlx_hybrid_ray.placement import PlacementRequest, reserve
from trlx_hybrid_ray.worker_group import WorkerGroup, register, this_worker

sys.path.insert(0, str(Path(__file__).parent.parent))


class Summing:
    """Workers of one process group."""

    @register("one_to_all")
    def meet(self):
        this_worker().init_process_group("gloo")

    @register("scatter")
    def sums(self, batch):
        """For each number the sum of the numbers that all ranks got, and this host's name."""
        total = torch.tensor(float(sum(batch)))
        torch.distributed.all_reduce(total)
        return [(total.item(), socket.gethostname()) for _ in batch]


def group(deadline):
    placement = reserve(PlacementRequest(name="sum", replicas=4, cpus=1, strategy="spread"))
    with WorkerGroup(Summing, placement, deadline=float(deadline)) as workers:
        workers.meet()
        print(workers.sums(list(range(8))))


def engine(deadline, folder):
    """GRPO here with an engine that this host has too few CPUs for."""
    from remote_training import STEPS, Trained, requests_of
    from trlx_hybrid import HybridConfig
    from trlx_hybrid.contract.types import Sampling

    hybrid = HybridConfig(
        engine="remote",
        engine_options={"cpus": 6, "restarts": 0},
        weights_options={"deadline": float(deadline)},
    )
    trained = Trained(folder, hybrid)
    assert len(trained.losses) == STEPS
    session = trained.session
    sampling = Sampling(max_tokens=12, temperature=0.7, logprobs=0)
    with session.rollout_phase(training=False):
        assert session.weights.check(full=True) == len(session.policy.checkpoint_names())
        requests = requests_of(4)
        for request, completion in zip(requests, session.live_engine.generate(requests, sampling), strict=True):
            expected = session.policy.log_probs(request.prompt_ids, completion.token_ids, temperature=0.7)
            found = torch.tensor([each[0] for each in completion.logprobs])
            torch.testing.assert_close(found, expected.to(found), atol=1e-5, rtol=0.0)
    (replica,) = session.live_engine.pool.replicas.values()
    (at,) = [node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"][:12] in replica.where]
    print("trained on", socket.gethostname(), "with an engine at", at)
    session.close()


if __name__ == "__main__":
    with connect(sys.argv[1]):
        globals()[sys.argv[2]](*sys.argv[3:])
