"""Launched by tests: each rank has a remote reward and a remote environment, and tells on which GPUs they are.

launcher placed.py OUT
"""

import json
import os
import sys
from pathlib import Path

import ray
from trlx_hybrid_ray.remote import remote_environment, remote_reward


def place():
    context = ray.get_runtime_context()
    return [context.get_node_id()[:6], *map(str, ray.get_gpu_ids())]


def judge(prompts, log_extra, **_):
    log_extra("place", [json.dumps(place())] * len(prompts))
    return [1.0] * len(prompts)


class Counter:
    def reset(self, **_):
        return "count"

    def where(self) -> list:
        """Where this is."""
        return place()


def places_of(reward):
    found = []
    reward(prompts=["a", "b"], completions=["", ""], log_extra=lambda _, told: found.extend(map(json.loads, told)))
    return found


def main():
    with remote_reward(judge, workers=2, gpus=1) as reward:
        judges = places_of(reward)
        reward.close()
        again = places_of(reward)
        counter = remote_environment(Counter, gpus=1, cpus=0.5)()
        found = {"judges": judges, "again": again, "counters": [counter.where()]}
    (Path(sys.argv[1]) / f"placed.{os.environ.get('RANK', 0)}").write_text(json.dumps(found))
    print("done", flush=True)


if __name__ == "__main__":
    main()
