"""Stops at a breakpoint, or fails, in the part of a run that the first argument names. Prints what came of it."""

import sys

from trlx_hybrid_ray.actors import ensure_connected
from trlx_hybrid_ray.remote import remote_environment, remote_reward
from trlx_hybrid_ray.worker_group import WorkerError, WorkerGroup, register

where = sys.argv[1]


def score(prompts, **columns):
    marker = 40  # what the debugger is asked for
    if where == "post-mortem":
        raise ValueError(f"marker {marker}")
    if where == "reward":
        breakpoint()
        marker += 1
    return [float(marker)] * len(prompts)


class Sandbox:
    def reset(self, **row):
        return None

    def run(self):
        marker = 50
        breakpoint()
        return marker + 1


class Member:
    @register(dispatch="one_to_all")
    def run(self):
        marker = 60
        breakpoint()
        return marker + 1


if where == "environment":
    with remote_environment(Sandbox) as environments:
        print("result", environments().run())
elif where == "register":
    ensure_connected()
    with WorkerGroup(Member, 1) as group:
        print("result", group.run())
else:
    with remote_reward(score, deadline=5) as reward:
        try:
            print("result", reward(prompts=["a"]))
        except WorkerError as error:
            print("result", repr(error.__cause__))
