"""The game "guess a number", as an environment that talks, and as an environment whose methods are tools."""

from trlx_hybrid_multiturn import Step


class GuessingGame:
    """An environment that answers the model's guesses with "higher" or "lower"."""

    async def reset(self, row):
        """Take the row's number, and return the text that is appended to the prompt."""
        self.number = row["number"]
        return f"I think of a number from 1 to {row['highest']}. Answer with a guess."

    async def step(self, completion):
        """Compare the guess with the number."""
        guess = completion.rpartition("</think>")[2].strip()
        if not guess.isdecimal() or int(guess) == self.number:
            return Step(done=True, reward=float(guess.isdecimal()))
        return Step(observation="higher" if int(guess) < self.number else "lower", reward=0.0)


class GuessingTool:
    """The same game, as TRL takes environments: public methods are tools."""

    def reset(self, number, highest, **columns):
        """Take the row's number. TRL resets one object for many episodes."""
        self.number, self.found = number, False
        return f"I think of a number from 1 to {highest}. Guess it with the tool."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.
        """
        self.found = self.found or number == self.number
        return "right" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self):
        """Return the reward of the episode."""
        return float(self.found)
