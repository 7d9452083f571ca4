"""A taskset of verifiers whose environment asks the model the same twice, at one time."""

import asyncio

import verifiers.v1 as vf


class Tasks(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield vf.Task(vf.TaskData(prompt="Make a riddle."), self.config.task)


class TwoConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class TwoEnv(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        await asyncio.gather(agents.first.run(task), agents.second.run(task))


__all__ = ["Tasks", "TwoEnv"]
