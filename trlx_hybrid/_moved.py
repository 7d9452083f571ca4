"""Former names of modules that have moved. Importing one warns, and gives the module at its new place.

Plugins and scripts written for earlier releases, old pickles and old recordings name modules by these names.
`docs/compatibility.md` says how long they stay.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

NAMES = {
    "answers": "episodes.answers",
    "cli": "commands.main",
    "copies": "interprocess.copies",
    "deadline": "interprocess.deadline",
    "doctor": "commands.doctor",
    "environments": "commands.environments",
    "excerpt": "episodes.answers",
    "forecast": "commands.forecast",
    "hybrid_engine": "own_loop.hybrid_engine",
    "kept_tokens": "contract.support",
    "layouts": "own_loop.layouts",
    "plain_data": "interprocess.plain_data",
    "plugins.blame": "blame",
    "process_tree": "interprocess.process_tree",
    "protocols": "contract.protocols",
    "ranks": "interprocess.ranks",
    "recipe": "commands.recipe",
    "remote_errors": "interprocess.remote_errors",
    "rollout.completions": "plugins.checks",
    "rollout.conversation": "contract.conversation",
    "rollout.model_generate": "own_loop.model_generate",
    "rollout.single_turn": "plugins.builtin",
    "rollout.tokenizer": "episodes.tokenizer",
    "rollout.unparsed": "episodes.unparsed",
    "scaffold": "commands.new",
    "serving": "contract.serving",
    "support": "contract.support",
    "train": "commands.train",
    "trl.recording": "trl.replay.recording",
    "trl.routing": "routing",
    "types": "contract.types",
    "variables": "interprocess.environment_variables",
    "weights.adapters": "policy.adapters",
    "weights.fingerprint": "policy.fingerprint",
    "weights.first_step": "policy.first_step",
    "weights.frozen": "policy.fingerprint",
    "weights.gather": "plugins.builtin",
    "weights.merging": "policy.adapters",
    "weights.policy": "policy.policy",
    "weights.positions": "policy.positions",
    "weights.quantised": "policy.quantised",
    "weights.sharded": "policy.sharded",
    "weights.step_size": "policy.first_step",
}
"""The present name of each module that has moved, by its former name, both within this package."""

MOVED = {f"{__package__}.{former}": f"{__package__}.{new}" for former, new in NAMES.items()}
"""The present name of each module that has moved, by its former name, both with the package's name in front, as
`import` takes them."""


class FormerNames:
    """A finder that finds and loads modules by their former names. It comes last on `sys.meta_path`, so it costs no
    other import anything. It has no base class: importing `importlib.abc` takes 8 ms."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the former name of a module, and give a FutureWarning to the code that imports it; None for
        other names."""
        if fullname not in MOVED:
            return None
        warnings.warn(_told(fullname), FutureWarning, stacklevel=2)  # Python skips its own frames
        return ModuleSpec(fullname, cast("Loader", self))

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Finish the import of a module by its former name: replace the empty module in `sys.modules` by the one that
        has the new name, so that both names give the same module.

        Args:
            module: the empty module that Python has made for the former name.
        """
        sys.modules[module.__name__] = import_module(MOVED[module.__name__])

    def get_code(self, fullname: str) -> CodeType:
        """Return a program that runs the module at its new place, for `python -m` and its former name."""
        program = f"import runpy; runpy.run_module({MOVED[fullname]!r}, run_name='__main__', alter_sys=True)"
        return compile(program, fullname, "exec")


def module(former: str) -> ModuleType:
    """Return a module by its former name, with a FutureWarning for the caller's caller."""
    warnings.warn(_told(former), FutureWarning, stacklevel=3)
    return import_module(MOVED[former])


def _told(former: str) -> str:
    return f"The module {former} is {MOVED[former]} now."


def install() -> None:
    """Make the moved modules of this package importable by their former names in this process, with a FutureWarning.
    The package calls it when it is imported; a second call does nothing."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.append(FormerNames())
