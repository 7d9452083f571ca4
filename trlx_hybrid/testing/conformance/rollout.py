"""The conformance check of rollouts: it lets a rollout component sample batches of completions, and conversations with
a tool, and checks every token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...contract.conversation import Dialogue, Limits
from ...contract.types import Completion, Request
from ...errors import ComponentError
from ...weights.verify import allowed_gap
from .findings import ConformanceError, require, require_completions, require_log_probs
from .runs import PROMPTS, run_with

if TYPE_CHECKING:
    from ...contract.conversation import Conversation, Message
    from ...session import Session

OBSERVED = [70, 71, 72, 73, 74]
"""The answer of the tool in the checked conversations, as token ids."""

TURNS = 3


def check_rollout(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    engine: str = "vllm",
    engine_options: Mapping[str, Any] | None = None,
    plugins: Sequence[object] = (),
    model: Any = None,
    tokenizer: Any = None,
) -> None:
    """Let a rollout sample two batches, and conversations with a tool if it supports them, and check every token.

    Args:
        name: name of the rollout, as in `HybridConfig.rollout`.
        options: its options, as in `HybridConfig.rollout_options`.
        engine, engine_options: the engine that samples, and its options. Its context must hold 128 tokens.
        plugins: objects with hook implementations that offer the rollout, if it is not installed.
        model, tokenizer: the model to sample from, and its tokenizer; by default a tiny Qwen3 and a tokenizer of
            characters.

    Raises:
        ConformanceError: the rollout does something else than `trlx_hybrid.contract.protocols.Rollout` says.
    """
    config: dict[str, Any] = {"engine": engine, "engine_options": dict(engine_options or {})}
    config |= {"rollout": name, "rollout_options": dict(options or {}) or None}
    with run_with(plugins=plugins, model=model, tokenizer=tokenizer, **config) as run:
        _batches(f"rollout {name!r}", run.session)
        if run.session.rollout is not None and run.session.rollout.converses:
            _conversations(f"rollout {name!r}", run.session)


def _batches(name: str, session: Session) -> None:
    """Check that the rollout returns one completion per prompt, in the same order, and other completions when it
    samples the same prompts again.

    Args:
        name: the rollout's name, for messages.
        session: a run with the rollout.
    """
    given = [Request(prompt_ids=prompt, seed=0) for prompt in PROMPTS]
    seen = []
    for _ in range(2):
        with session.rollout_phase(True), _told(name, session, "on_completion", len(given)):
            completions = require_completions(_generated(session), given, name)
        allowed = allowed_gap(session.live_engine, session.policy, torch.float32)[0]
        require_log_probs(session.policy, given, completions, allowed, of=name)
        seen.append([completion.token_ids for completion in completions])
    require(
        seen[0] != seen[1],
        f"{name}: two rollouts of the same prompts sampled the same.",
        "Hand the requests on with their seeds, which differ from rollout to rollout.",
    )


def _generated(session: Session) -> list[Completion]:
    """Return the completions of `PROMPTS`, sampled by the rollout as in a run. An error of the rollout becomes a
    ConformanceError."""
    try:
        return session.generate(list(PROMPTS))
    except ComponentError as error:
        raise ConformanceError(str(error)) from error


def _conversations(name: str, session: Session) -> None:
    """Check that every conversation runs to its end, and that its loss mask is 1 for sampled and 0 for observed tokens.

    Args:
        name: the rollout's name, for messages.
        session: a run with the rollout.
    """
    limits = Limits(completion_tokens=64, model_tokens=128, tool_turns=TURNS - 1)
    dialogues = [_dialogue(prompt) for prompt in PROMPTS]
    with session.rollout_phase(True), _told(name, session, "on_conversation", len(dialogues)):
        try:
            conversations = session.converse(dialogues, limits)
        except ComponentError as error:
            raise ConformanceError(str(error)) from error
    require(
        len(conversations) == len(dialogues),
        f"{name}: `converse` returned {len(conversations)} conversations for {len(dialogues)} dialogues.",
        "Return one for each, in their order; one that breaks off has `failure` set and its mask 0.",
    )
    allowed = allowed_gap(session.live_engine, session.policy, torch.float32)[0]
    for index, (dialogue, conversation) in enumerate(zip(dialogues, conversations, strict=True)):
        require(
            conversation.failure is None,
            f"{name}: conversation {index} broke off: {conversation.failure}.",
            "Its tool takes no arguments and returns at once.",
        )
        _masked(f"{name}: conversation {index}", session, dialogue, conversation, allowed)


@contextmanager
def _told(name: str, session: Session, hook: str, count: int) -> Iterator[None]:
    """A context, around a rollout's work, that checks whether the rollout reports every row as soon as it is finished,
    by calling a function of the session.

    Nothing is checked if the rollout's attribute `tells` is False, since it then promises no such reports, or if the
    engine finishes all rows at once.

    Args:
        name: the rollout's name, for messages.
        session: a run with the rollout.
        hook: name of the session's function, "on_completion" or "on_conversation".
        count: the number of rows that must be reported, each once.

    Raises:
        ConformanceError: a row was not reported or was reported twice, or an unknown row was reported.
    """
    engine, rollout, rows = session.selection.engine, session.rollout, list[int]()
    if engine is None or rollout is None or not (rollout.tells and engine.component.streams):
        yield
        return
    setattr(session, hook, lambda row, *_: rows.append(row))
    try:
        yield
    finally:
        setattr(session, hook, None)
    require(
        sorted(rows) == list(range(count)),
        f"{name}: `tells` is set, and `{hook}` was called for the rows {rows} of {count}.",
        f"Call `session.{hook}`, where it is not None, once for each row as it is there; or leave `tells` at False.",
    )


def _masked(of: str, session: Session, dialogue: Dialogue, conversation: Conversation, allowed: float) -> None:
    ids, mask = conversation.completion_ids, conversation.loss_mask
    require(
        len(mask) == len(ids) == len(conversation.logprobs or []),
        f"{of} has {len(ids)} tokens, a mask of {len(mask)} and {len(conversation.logprobs or [])} log-probs.",
        "One of each for every token after the prompt.",
    )
    starts = [i for i in range(len(ids)) if ids[i : i + len(OBSERVED)] == OBSERVED]
    observed = {position for start in starts for position in range(start, start + len(OBSERVED))}
    require(
        len(starts) == TURNS - 1,
        f"{of} shows the model {len(starts)} observations; its tool was called in {TURNS - 1} turns.",
        "Append what `Dialogue.observe` returns, whole and as it is.",
    )
    wrong = [position for position, value in enumerate(mask) if bool(value) == (position in observed)]
    require(
        not wrong,
        f"{of}: the mask says {mask[wrong[0]] if wrong else 0} at token {wrong[:1]}, which was "
        f"{'observed' if wrong and wrong[0] in observed else 'sampled'}.",
        "1 where the model sampled a token, 0 where it was shown one: a mask that is off by one trains on what tools "
        "said.",
    )
    expected = session.policy.log_probs(dialogue.prompt_ids, ids)
    for position, value in enumerate(conversation.logprobs or []):
        if position not in observed:
            gap = abs(float("nan") if value is None else value - float(expected[position]))
            require(
                gap <= allowed,
                f"{of}: the log-prob of token {position} is {gap:.3g} nats from the policy's ({allowed:g} allowed).",
                "Keep those of a turn with its tokens, in their order, with 0.0 for what was observed.",
            )


def _dialogue(prompt: list[int]) -> Dialogue:
    """Return the input of a conversation, in which every answer of the model counts as a call of the only tool.

    Args:
        prompt: the prompt's token ids.
    """

    def parse(sampled: list[int], before: list[int]) -> Message:
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def look() -> str:
        return "seen"

    tools = {"look": look}
    return Dialogue(
        prompt_ids=prompt,
        parse=parse,
        observe=lambda messages: list(OBSERVED),
        sync_tools=tools,
        async_tools={},
        run_tools=tools,
    )
