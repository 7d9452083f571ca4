"""An OpenEnv server with a game: guess a number from 0 to 9 in four attempts. Arguments: port, sessions."""

import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class Guess(Action):
    guess: str = Field(max_length=100)


class Hint(Observation):
    hint: str
    tries: int


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.tries = (seed or 0) * 7 % 10, 0
        return Hint(hint="Guess a number from 0 to 9.", tries=0)

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "hang":
            time.sleep(5)
        if action.guess == "long":
            return Hint(hint="x" * (3 << 20), tries=self.tries)
        self.tries += 1
        guess = int(action.guess)  # raises for what is no number
        if guess == self.number:
            return Hint(hint="Right.", tries=self.tries, done=True, reward=1.0)
        hint = "It is more." if guess < self.number else "It is less."
        return Hint(hint=hint, tries=self.tries, done=self.tries == 4, reward=-0.25)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_app(Game, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
