"""Specifications of every hook that a plugin can implement: this module is the plugin author's manual.

Replace a component by offering one in `trlx_register`; observe the run with the others. Mark implementations with
`trlx_hybrid.hookimpl`; a hook may take fewer arguments than listed here, never others. Plugins run in the order of
their names, last first, the same on every rank. An exception in a hook stops the run with a message that names the
plugin. Where TRL already has an argument for something (reward functions, callbacks, tools) there is no hook.

Every rank calls the hooks, each with its own rows. Print, and write files, only where `session.ranks.rank == 0`.
`session.ranks.gather(value)` returns the values of all ranks; every rank must call it, so call it before that `if`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from torch import Tensor

    from ..contract.protocols import Run
    from ..contract.types import Finding, Phase, SyncPlan, SyncReport, Trajectory
    from .registry import Registry

PROJECT = "trlx_hybrid"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(historic=True)
def trlx_register(registry: Registry) -> None:
    """Offer components: `registry.offer("engine", "mine", factory, ...)`.

    Called once per host, when the plugin is loaded; a plugin registered later is called at once. Import heavy
    backends inside the factory, not here: loading every plugin must stay cheap. Returns nothing.
    """


@hookspec
def trlx_configure(session: Run) -> None:
    """Prepare for a run: the trainer is built and the components are chosen; the engine does not exist yet.

    Called once per trainer, on every rank, before any rollout. Returns nothing.
    """


@hookspec
def trlx_unconfigure(session: Run) -> None:
    """Clean up at the end of a run: release what `trlx_configure` took. The session is closing.

    Called once, also after a failure; the engine still exists if it was built. Returns nothing.
    """


@hookspec
def trlx_leave_phase(session: Run, phase: Phase, step: int) -> None:
    """Free the device memory that the plugin held for `phase`, which is over.

    Called at each change between ROLLOUT and TRAIN, on every rank; it finishes in all plugins before `trlx_enter_phase`
    starts in any. `step` is the number of optimizer steps done. Returns nothing.
    """


@hookspec
def trlx_enter_phase(session: Run, phase: Phase, step: int) -> None:
    """Allocate, or bring back, the device memory that the plugin needs in `phase`, which begins.

    Called at each change between ROLLOUT and TRAIN, on every rank, after `trlx_leave_phase`, where plugins free memory,
    has finished in all plugins. When ROLLOUT begins, the engine is awake and holds the current weights. `step` is the
    number of optimizer steps done. Returns nothing.
    """


@hookspec
def trlx_sync_start(session: Run, plan: SyncPlan) -> None:
    """Observe the plan of a weight sync, before the policy's weights are brought into the engine.

    Called before each weight sync, on every rank; never with TRL's own generation path. Returns nothing.
    """


@hookspec
def trlx_sync_end(session: Run, report: SyncReport) -> None:
    """Observe the report of a weight sync: the engine holds the policy's weights, and the checks passed.

    Called after each successful weight sync, on every rank. Returns nothing.
    """


@hookspec
def trlx_rollout_end(session: Run, trajectories: Sequence[Trajectory]) -> None:
    """Log or record a batch of trajectories that was sampled and scored.

    Called on every rank with this rank's rows, in TRL's order, for training and evaluation batches alike
    (`session.training` tells), with any engine. Trajectories are frozen: this hook only observes. Returns nothing.
    """


@hookspec
def trlx_log(session: Run, metrics: dict[str, float]) -> None:
    """Observe a line of the trainer's log: what TRL, transformers and `session.metrics` put into it.

    Called on every rank whenever the trainer logs (`logging_steps`, evaluations, the end of training). `metrics` is a
    copy of the dict that transformers passes to a callback's `on_log` as `logs`: changes are not logged. `session.step`
    is the line's step. Returns nothing.
    """


@hookspec(firstresult=True)
def trlx_advantages(session: Run, batch: dict[str, Any]) -> Tensor | None:
    """Replace the advantages of a batch.

    Called after TRL computed them, on every rank. `batch` is what TRL trains on, this rank's rows: among others
    `prompt_ids`, `completion_ids`, `completion_mask` (B, T) and `advantages` (B,), plus `rewards_per_func`, the rewards
    of all ranks (world * B, number of reward functions), NaN where a function returned None or the row's conversation
    broke off. Return a tensor shaped like `batch["advantages"]`, of finite numbers, or None to keep TRL's. One plugin
    may have this hook: a trainer refuses two, and the lines printed when the run starts name the plugin.
    """


@hookspec
def trlx_report_header(session: Run) -> str | list[str] | None:
    """Add lines to those that are printed when a run starts: its components, why they were chosen, and its memory.

    Called once, on every rank, when the engine is built or, with TRL's own generation, when training starts; rank 0
    prints. Return a line, a list of lines, or None to add nothing.
    """


@hookspec
def trlx_command(commands: Any) -> None:
    """Add a command to `trlx-hybrid`: `commands.add_parser("mine", help=...).set_defaults(run=function)`.

    Called whenever `trlx-hybrid` starts, so import heavy things inside the function. `commands` is what
    `ArgumentParser.add_subparsers` returns; `run` takes the parsed arguments and returns the exit status.
    Returns nothing.
    """


@hookspec
def trlx_doctor(options: Any) -> Iterable[Finding] | None:
    """Add checks to `trlx-hybrid doctor`, for what this plugin needs of the machine.

    Called once by `trlx-hybrid doctor`, before it prints: raise a `ConfigError` for invalid options. `options` are its
    parsed arguments; a plugin adds its own options in `trlx_command`:
    `commands.choices["doctor"].add_argument("--mine")`. Run checks that take long only with such an option.
    Return findings, or None to add nothing. They are printed after the command's own checks. If this hook is a
    generator, each finding is printed as soon as it is yielded.
    """
