"""The conformance check of engines: it uses an engine as a trainer does, and checks every result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...contract.types import Completion, Request, Sampling
from ...memory.ledger import storages
from ...weights.verify import allowed_gap
from .findings import ConformanceError, require, require_completions, require_log_probs
from .runs import TOKENS, as_it_is, change, requests, run_with, with_a_trainers_forward

if TYPE_CHECKING:
    from ...policy.policy import Policy
    from ...session import Session

STREAM_SECONDS = 60.0


def check_engine(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    plugins: Sequence[object] = (),
    model: Any = None,
    tokenizer: Any = None,
) -> None:
    """Use an engine as a trainer does (load and compare weights, sample, sleep, wake, stream), and check every result.

    Args:
        name: name of the engine, as in `HybridConfig.engine`. Its context must hold 64 tokens.
        options: its options, as in `HybridConfig.engine_options`.
        plugins: objects with hook implementations that offer the engine, if it is not installed.
        model, tokenizer: the model to serve, and its tokenizer; by default a tiny Qwen3 and a tokenizer of characters.

    Raises:
        ConformanceError: the engine does something else than the protocol `trlx_hybrid.contract.protocols.Engine` says.
    """
    config: dict[str, Any] = {"engine": name, "engine_options": dict(options or {}), "weights": "gather"}
    with run_with(plugins=plugins, model=model, tokenizer=tokenizer, **config) as run:
        with_a_trainers_forward(run.session.policy.base)
        run.session.open()
        checks = EngineChecks(name, run.session)
        checks.loads()
        checks.samples()
        checks.draws_by_seed()
        checks.follows_the_weights()
        checks.sleeps()
        checks.streams()


class EngineChecks:
    """The steps of `check_engine`, one per method, to be called in the order of their definition. Each leaves the
    engine awake, with the policy's weights.

    Args:
        name: the engine's name, for messages.
        session: a run with the engine.
    """

    def __init__(self, name: str, session: Session) -> None:
        self._name, self._engine, self._policy = f"engine {name!r}", session.live_engine, session.policy
        choice = session.selection.engine
        self._streams = choice is not None and choice.component.streams
        self._allowed = allowed_gap(self._engine, self._policy, torch.float32)[0]
        # In 16 bits, another order of sums may change which of two tokens is sampled for the same request.
        self._exact = self._engine.dtype is torch.float32 and not self._engine.quantized

    def loads(self) -> None:
        """Check that `load_weights` brings all weights into the engine, and that `differing` names a weight that
        differs."""
        self._engine.wake("weights")
        self._load()
        name, tensor = next(iter(self._policy.full_weights()))
        other = tensor.clone()
        other.view(-1)[-1] += 1.0
        found = self._engine.differing(iter([(name, other)]))
        require(
            len(found) == 1 and found[0].startswith(name),
            f"{self._name}: `differing` was given {name} with one element changed, and returned {found}.",
            "Compare all elements with those in the engine's memory: every proof of a weight sync rests on it.",
        )
        self._engine.wake("kv_cache")

    def _load(self) -> None:
        report = self._engine.load_weights(self._policy.full_weights())
        require(
            not report.unwritten,
            f"{self._name}: `load_weights` was given all tensors and left {list(report.unwritten)[:3]} unwritten.",
            "Write every parameter, or leave out of the report what is derived from others.",
        )
        differing = self._engine.differing(self._policy.full_weights())
        require(
            not differing,
            f"{self._name}: after `load_weights` its memory holds other bits in {differing[:3]}.",
            "Copy into the memory that the engine computes with.",
        )

    def samples(self) -> None:
        """Check that sampling returns one completion per request, in the order of the requests, with a correct length
        and finish reason, and with the policy's log-probs."""
        given = requests()
        plain = Sampling(max_tokens=TOKENS, logprobs=0)
        for temperature in (1.0, 0.6):
            completions = self._generate(given, replace(plain, temperature=temperature))
            self._fit(given, completions, temperature)
        end = self._policy.base.generation_config.eos_token_id
        ends = set(end if isinstance(end, list) else [end])
        for index, (request, completion) in enumerate(zip(given, completions, strict=True)):
            limit, tokens = request.max_tokens or TOKENS, completion.token_ids
            found = f"{self._name}: request {index} was allowed {limit} tokens, and has {len(tokens)}"
            require(len(tokens) <= limit, f"{found}.", "Heed Request.max_tokens before Sampling.max_tokens.")
            stopped = tokens[-1] in ends
            expected = "stop" if stopped else "length"
            either = stopped and len(tokens) == limit
            require(
                (stopped or len(tokens) == limit) and (either or completion.finish_reason == expected),
                f"{found}, with finish_reason={completion.finish_reason!r}.",
                f"Sample until the limit or an end token, and say which it was: {expected!r} here.",
            )
        silent = self._generate(given, Sampling(max_tokens=TOKENS))
        require(
            all(completion.logprobs is None for completion in silent),
            f"{self._name}: it returned log-probs that were not asked for (Sampling.logprobs=None).",
            "Leave Completion.logprobs None.",
        )
        self._ranks(given[0], self._generate(given[:1], replace(plain, logprobs=2))[0])

    def _ranks(self, request: Request, completion: Completion) -> None:
        """Check that each position of a completion lists the two most probable tokens and the sampled one, most
        probable first, with their log-probs.

        Args:
            request: the request.
            completion: its completion, sampled with `Sampling(logprobs=2)`.
        """
        tokens = completion.token_ids
        values, ids = completion.logprobs or [], completion.logprob_token_ids or []
        right = len(values) == len(ids) == len(tokens)
        for place, (token, of_token, named) in enumerate(zip(tokens, values, ids, strict=False)):
            before = [*request.prompt_ids, *tokens[:place]]
            expected = [float(self._policy.log_probs(before, [other])[0]) for other in named]
            numbers = [float("nan") if value is None else value for value in of_token]
            right = right and token in named and len(set(named)) == len(numbers) in (2, 3)
            right = right and all(abs(a - b) <= self._allowed for a, b in zip(numbers, expected, strict=True))
            right = right and numbers == sorted(numbers, reverse=True)
        require(
            right,
            f"{self._name}: with Sampling.logprobs=2 it returned {values[:1]} for tokens {ids[:1]}.",
            "Return the two most probable and the sampled token, most probable first, ids and values alike.",
        )

    def draws_by_seed(self) -> None:
        """Check that what is sampled for a request depends on its seed, and not on its place in the batch or on the
        other requests. Checked in float32 only."""
        if not self._exact:
            return
        given, sampling = requests(), Sampling(max_tokens=TOKENS, logprobs=0)
        once = [c.token_ids for c in self._generate(given, sampling)]
        backwards = [c.token_ids for c in self._generate(given[::-1], sampling)][::-1]
        require(
            once == backwards,
            f"{self._name}: the same requests in another order were answered otherwise.",
            "Draw with a generator of each request's own, seeded with Request.seed.",
        )
        twins = [ids for ids, request in zip(once, given, strict=True) if request.prompt_ids == given[1].prompt_ids]
        require(
            len({tuple(ids) for ids in twins}) == len(twins),
            f"{self._name}: two requests with one prompt and different seeds have the same completion.",
            "Draw with Request.seed: a group of equal completions has no advantages.",
        )

    def follows_the_weights(self) -> None:
        """Check that the engine samples from the weights that were loaded last, also for a prompt that it has served
        before.

        A change of the policy's weights must have no effect until the new ones are loaded.
        """
        given, sampling = requests(), Sampling(max_tokens=TOKENS, logprobs=0)
        self._generate(given, sampling)
        before = as_it_is(self._policy)
        change(self._policy, seed=1)
        completions = self._generate(given, sampling)
        try:
            require_log_probs(self._policy, given, completions, self._allowed, of=self._name)
        except ConformanceError:
            require_log_probs(before, given, completions, self._allowed, of=f"{self._name}, before it had new weights,")
        else:
            raise ConformanceError(
                f"{self._name}: the policy's weights were changed, and it sampled from them before it was given them. "
                "Sample from its own: a copy of the policy must not inherit `forward`, which a trainer puts on the "
                "model itself, and which computes with the policy (`vars(copy).pop('forward', None)`)."
            )
        self._load()
        self._fit(given, self._generate(given, sampling), before=before)

    def sleeps(self) -> None:
        """Check that a sleeping engine frees memory, that `weights_lost` says whether its weights are gone, and that it
        samples the same completions after waking."""
        if not self._engine.sleeps:
            return
        given, sampling = requests(), Sampling(max_tokens=TOKENS, logprobs=0)
        expected = self._generate(given, sampling)
        awake = self._held()
        self._engine.sleep(keep_weights=True)
        self._engine.wake("weights")
        kept = not self._engine.weights_lost and not self._engine.differing(self._policy.full_weights())
        require(
            kept,
            f"{self._name}: `sleep(keep_weights=True)` lost weights.",
            "Keep them: the policy's parameters may be this very memory, or nothing would bring them back.",
        )
        self._engine.wake("kv_cache")
        for seed in (None, 2):
            self._engine.sleep()
            held, takes = self._held(), self._engine.asleep_bytes
            require(
                held < awake and takes > 0,
                f"{self._name}: asleep it holds {held} bytes of {awake}, and asleep_bytes={takes}.",
                "Give memory back, and say so in `resident` and `asleep_bytes`: the ledger plans with both.",
            )
            self._engine.sleep()  # a second call does nothing
            before = as_it_is(self._policy)
            if seed is not None:
                change(self._policy, seed)
            self._engine.wake("weights")
            if seed is not None or self._engine.weights_lost:
                self._load()
            else:
                lost = self._engine.differing(self._policy.full_weights())
                require(
                    not lost,
                    f"{self._name}: it slept with weights_lost=False, and other bits are in {lost[:3]} now.",
                    "Set weights_lost when sleeping discards them: a sync follows then.",
                )
            self._engine.wake("kv_cache")
            completions = self._generate(given, sampling)
            self._fit(given, completions, before=before if seed is not None else None)
            require(
                seed is not None
                or not self._exact
                or [c.token_ids for c in completions] == [c.token_ids for c in expected],
                f"{self._name}: after sleep and wake the same requests were answered otherwise.",
                "Clear what the KV cache held before it slept.",
            )

    def _held(self) -> int:
        """Return how many bytes the engine holds in its weights and KV cache."""
        named = [tensor for what in ("weights", "kv_cache") for tensor in self._engine.resident(what)]
        return sum(storage.nbytes() for storage in storages(named))

    def streams(self) -> None:
        """Check that requests added to a stream one after the other get the same completions as in one batch, and that
        an aborted one gets none."""
        if not self._streams:
            return
        given, sampling = requests(), Sampling(max_tokens=TOKENS, logprobs=0)
        expected = [c.token_ids for c in self._generate(given, sampling)]
        found: dict[int, Completion] = {}
        deadline = time.monotonic() + STREAM_SECONDS
        with self._engine.stream(sampling) as stream:
            forgotten = stream.add(replace(given[0], max_tokens=None))
            keys = [stream.add(request) for request in given[:3]]
            stream.abort(forgotten)
            waiting, more = list(given[3:]), True
            while more:
                finished, more = stream.step(len(found) < len(given))
                found.update(finished)
                if waiting:
                    keys.append(stream.add(waiting.pop(0)))
                require(
                    time.monotonic() < deadline,
                    f"{self._name}: its stream had answered {len(found)} of {len(given)} requests after "
                    f"{STREAM_SECONDS:g} s.",
                    "Each step moves all requests on; `more` is False once no rank has any.",
                )
        require(
            forgotten not in found,
            f"{self._name}: its stream answered a request that was aborted.",
            "After `abort` a request's completion never comes.",
        )
        missing = [index for index, key in enumerate(keys) if key not in found]
        require(
            not missing,
            f"{self._name}: its stream ended without requests {missing}.",
            "Return each completion once, under the key that `add` returned.",
        )
        require(
            not self._exact or [found[key].token_ids for key in keys] == expected,
            f"{self._name}: requests that were streamed were answered otherwise than in one batch.",
            "The seed decides, and not when a request comes.",
        )

    def _generate(self, given: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return require_completions(self._engine.generate(given, sampling), given, self._name)

    def _fit(
        self,
        given: Sequence[Request],
        completions: Sequence[Completion],
        temperature: float = 1.0,
        before: Policy | None = None,
    ) -> None:
        allowed = self._allowed
        require_log_probs(
            self._policy, given, completions, allowed, of=self._name, temperature=temperature, before=before
        )
