"""The options of the rollout `multi_turn`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from trlx_hybrid.contract.conversation import Limits
from trlx_hybrid.episodes.answers import CHARACTERS, NOTE
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.plugins.builtin import SingleTurnOptions

Mode = Literal["thread", "process", "main"]
MODES: tuple[Mode, ...] = get_args(Mode)


def _ranks_here() -> int:
    """Return the number of processes that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnOptions(SingleTurnOptions):
    """Options in `HybridConfig.rollout_options` for `rollout="multi_turn"`. All limits are per rank.

    Attributes:
        tools: where synchronous tools run. "thread": beside the engine, many at once, so they must be thread-safe;
            "process": each call in a process that can be killed, for tools that compute or may crash; "main": in the
            trainer's thread one after another, as in TRL, while the engine waits. A tool that cannot work in a thread
            of its own (it uses `signal`, or a sqlite3 connection of another thread) is moved to "main" with a warning,
            and called again. Plain methods of environments run in threads, or in the trainer's thread with
            "main". Asynchronous tools run on the trainer's event loop.
        tool_modes: where single tools run, by name; overrides `tools`.
        max_tools: the largest number of calls that run at once in threads, calls of environments included. The same
            number limits the calls that run at once on the event loop. Further calls wait, and their time begins when
            they start.
        max_processes: the largest number of calls that run at once in processes; by default this rank's share of the
            machine's CPUs.
        max_trajectories: the largest number of trajectories in progress at once; all of them by default.
        tool_timeout: seconds that one call may take. If a tool takes longer, the model is shown an error; if an
            environment does, its trajectory ends.
        max_answer: the largest number of characters that the model is shown of one answer of a tool or an environment.
            A longer answer is cut at its end, with a note that says how much is shown.
        max_seconds: seconds that one trajectory may take; what it has by then is kept, as at a limit of tokens.
        max_turns: the largest number of turns (completions) of one trajectory; tool calls of the last turn are not
            executed.
        max_failed: share of a batch's trajectories that may break off (end by a failure, and not be trained on) before
            the run stops. One trajectory may always break off, unless the share is 0. A tool's own error does not break
            a trajectory off: the model is shown the error.
        max_hung: how many threads may hang at once, in tools that do not return, before the run stops.
        switch_interval: seconds between the interpreter's thread switches during a rollout. Shorter than Python's
            0.005, so that the thread that steps the engine waits less for tools that compute.
        progress: show a progress bar, where the trainer shows one.
        max_staleness, in_flight: as in `single_turn`, for conversations: those that are unfinished when a batch is
            complete stay in flight. A conversation that waits for a tool counts among the `in_flight`, and its calls go
            on while the trainer trains.
        record, record_limit: the older way to set the options of these names in `plugin_options["trajectories"]`, which
            record the trajectories of any rollout.
    """

    tools: Mode = "thread"
    tool_modes: Mapping[str, Mode] = field(default_factory=dict)
    max_tools: int = 256
    max_processes: int = field(default_factory=lambda: max(1, (os.cpu_count() or 1) // _ranks_here()))
    max_trajectories: int | None = None
    tool_timeout: float = 300.0
    max_answer: int = CHARACTERS
    max_seconds: float | None = None
    max_turns: int | None = None
    max_failed: float = 0.1
    max_hung: int = 16
    switch_interval: float = 0.0005
    progress: bool = True
    record: str | None = None
    record_limit: int = 8

    def __post_init__(self) -> None:
        SingleTurnOptions.__post_init__(self)  # `super()` fails in a dataclass with slots
        for name, mode in {"tools": self.tools, **self.tool_modes}.items():
            if mode not in MODES:
                raise ConfigError(f"rollout_options: {name!r} is to run in {mode!r}; choose one of {', '.join(MODES)}.")
        for name in ("max_tools", "max_processes", "max_trajectories", "tool_timeout", "max_seconds", "max_turns"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"rollout_options: {name} must be more than 0, got {value}.")
        if self.max_answer <= NOTE:
            raise ConfigError(f"rollout_options: max_answer must be more than {NOTE}, got {self.max_answer}.")
        if self.max_hung < 0:
            raise ConfigError(f"rollout_options: max_hung must be 0 or more, got {self.max_hung}.")
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(f"rollout_options: max_failed is a share from 0 to 1, got {self.max_failed}.")

    def limited(self, limits: Limits) -> Limits:
        """Return the limits of a conversation, with the turns that the option `max_turns` allows."""
        turns = limits.tool_turns if self.max_turns is None else self.max_turns - 1
        return Limits(
            completion_tokens=limits.completion_tokens,
            model_tokens=limits.model_tokens,
            tool_turns=min(limits.tool_turns, turns),
        )
