"""A taskset of verifiers: say a number's word, in as many attempts as the task allows."""

import asyncio

import verifiers.v1 as vf

print("a taskset that prints")

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven"]


class WordData(vf.TaskData):
    word: str
    attempts: int = 3
    fails: str | None = None


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if self.data.fails == "scoring":
            raise ValueError("no score")
        return float(trace.branches[-1].messages[-1].content.strip() == self.data.word)

    @vf.reward(weight=-0.5)
    async def extra_turns(self, trace) -> float:
        return trace.num_turns - 1.0


class WordTasks(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for number, word in enumerate(WORDS):
            yield WordTask(
                WordData(
                    prompt=f"What is {number} in words?",
                    system_prompt="Answer with one word." if number % 2 else None,
                    word=word,
                    attempts=1 + number % 3,
                ),
                self.config.task,
            )


class WordEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as exchange:
            segment = await exchange.turn()
            for _ in range(1, task.data.attempts):
                if segment.terminated or segment.last_reply == task.data.word:
                    break
                if task.data.fails == "hint":
                    raise ValueError("the game broke")
                if task.data.fails == "hangs":
                    await asyncio.sleep(1000)
                segment = await exchange.turn(f"It has {len(task.data.word)} letters.")


__all__ = ["WordEnv", "WordTasks"]
