"""A taskset of verifiers whose environment has two agents."""

import verifiers.v1 as vf


class Tasks(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield vf.Task(vf.TaskData(prompt="Make a riddle."), self.config.task)


class TwoConfig(vf.EnvConfig):
    asks: vf.AgentConfig = vf.AgentConfig()
    solves: vf.AgentConfig = vf.AgentConfig()


class TwoEnv(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        trace = await agents.asks.run(task)
        await agents.solves.run(task.with_data(prompt=trace.branches[0].messages[-1].content))


__all__ = ["Tasks", "TwoEnv"]
