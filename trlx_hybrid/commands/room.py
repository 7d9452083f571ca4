"""The setting that makes room for longer rows, as `trlx-hybrid train RECIPE --forecast` names it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import HybridError
from ..memory.estimate import GIB
from ..plugins.selection import STOCK
from ..policy.positions import beyond_positions
from .forecast import Forecast, GPUs, checkpointed_by_fsdp, forecast_of

if TYPE_CHECKING:
    from .recipe import RecipeSettings


def room_for(given: RecipeSettings, gpus: GPUs, context: int) -> str:
    """Return a line that names the first setting with which rows of so many tokens fit, if they do not fit as it is.

    Args:
        given: the settings of a run.
        gpus: the GPUs of the run.
        context: the number of tokens of a row.
    """
    recipe = copy.copy(given.recipe)
    recipe.context = context
    longer = given._replace(recipe=recipe)
    for change, settings in (("", longer), *_changed(longer)):
        found = _fitting(settings, gpus)
        if found is not None and found.activations is None:
            return (
                f"rows of {context} tokens: not known, scoring={given.hybrid.scoring!r} forecasts no activations here"
            )
        if found is not None and found.activations is not None:
            told = [f"rows of {context} tokens fit{f' with {change}' if change else ' as it is'}"]
            if found.activations.host:
                told.append(f"{found.activations.host / GIB:.2f} GiB of pinned host memory on each rank")
            if beyond_positions(found.loss.policy.base.config.get_text_config(), context, "context"):
                told.append("and a config with as many positions (YaRN)")
            return ", ".join(told)
    return f"rows of {context} tokens: no single setting makes room; take a GPU with more memory, or a smaller model"


def _fitting(given: RecipeSettings, gpus: GPUs) -> Forecast | None:
    """Return the forecast of a run, if the run fits; else None, also where PEFT does not know the model's layers."""
    try:
        found = forecast_of(given, gpus, positions=False)
        found.check()
    except (HybridError, ValueError):
        return None
    return found


def _changed(given: RecipeSettings) -> Iterator[tuple[str, RecipeSettings]]:
    """Yield settings with one change each, and the change as a text, those first that cost least."""
    args, model, hybrid = given.training, given.model, given.hybrid
    if not getattr(args, "vllm_enable_sleep_mode", True):
        yield "vllm_enable_sleep_mode=True", given._replace(training=_with(args, vllm_enable_sleep_mode=True))
    if not args.gradient_checkpointing and not checkpointed_by_fsdp(args):
        yield "gradient_checkpointing=True", given._replace(training=_with(args, gradient_checkpointing=True))
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if rows > 1 and rows % 2 == 0:
        fewer = {"per_device_train_batch_size": rows // 2, "gradient_accumulation_steps": 2 * steps}
        per_generation = args.steps_per_generation
        halved = _with(args, **fewer, steps_per_generation=per_generation and 2 * per_generation)
        yield " and ".join(f"{name}={value}" for name, value in fewer.items()), given._replace(training=halved)
    if hybrid.offload != "all" and hybrid.engine != STOCK:
        yield "offload='all'", given._replace(hybrid=replace(hybrid, offload="all"))
    if not model.use_peft:
        yield "use_peft=True", given._replace(model=_with(model, use_peft=True))
    elif not model.load_in_4bit:
        yield "load_in_4bit=True", given._replace(model=_with(model, load_in_4bit=True))


def _with(settings: Any, **changes: Any) -> Any:
    """Return a copy of a config with other values, which are not checked again."""
    changed = copy.copy(settings)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed
