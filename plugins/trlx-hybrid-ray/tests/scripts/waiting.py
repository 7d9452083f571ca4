"""Three calls of remote parts that take 2 s each, with deadlines of 6 s. Says when each begins and what it returned."""

import asyncio
import time

from trlx_hybrid_ray.remote import remote_environment, remote_reward


class Sleeper:
    def nap(self) -> str:
        time.sleep(2)
        return "awake"

    async def doze(self) -> str:
        await asyncio.sleep(2)
        return "up"


def slow(prompts, **columns):
    time.sleep(2)
    return [1.0] * len(prompts)


if __name__ == "__main__":
    with (
        remote_environment(Sleeper, deadline=6, cpus=0.1) as sleepers,
        remote_reward(slow, deadline=6, cpus=0.1) as reward,
    ):
        sleeper = sleepers()
        for call in (sleeper.nap, lambda: asyncio.run(sleeper.doze()), lambda: reward(prompts=["a"])):
            print("calling", flush=True)
            print("returned", call(), flush=True)
