"""What an environment raises when it can no longer answer."""

from __future__ import annotations

from asyncio import CancelledError


class EnvironmentLostError(CancelledError):
    """An environment will not answer any more: its worker died, or a call of it never came back. Says which, and why.

    No `Exception`, so that no tool loop shows it to the model as if the tool had raised it, and lets the episode go on
    with an environment that is gone. The rollout `multi_turn` ends the trajectory, masked and counted. TRL's own loop
    cannot leave a trajectory out: there it ends the run. Of what is no `Exception`, a cancellation is what an event
    loop survives.
    """
