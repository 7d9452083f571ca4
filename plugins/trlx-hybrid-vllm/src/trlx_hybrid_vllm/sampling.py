"""Conversions of trlx_hybrid's `Sampling` and `Request` to vLLM's forms, and of vLLM's outputs to `Completion`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trlx_hybrid.contract.types import Completion, Request, Sampling
from trlx_hybrid.errors import EngineError
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput


def sampling_params(sampling: Sampling, masks: bool = False) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` that all requests of a run share.

    `detokenize` is on only where there are stop strings: turning every token into text as it arrives costs as much as
    decoding it.

    Args:
        masks: whether vLLM is also to return the ids that each token was sampled from. It then needs a `top_k` and a
            temperature above 0 in every request. So where `top_k` is off, it is set to the number of all ids
            (`EVERY_ID`), and greedy sampling (a temperature of 0) becomes a `top_k` of 1 at temperature 1.
    """
    params: dict[str, Any] = {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.logprobs,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,  # each request is given parameters of its own, so vLLM need not copy them deeply
    } | dict(sampling.extra)
    structured = params.get("structured_outputs")
    if sampling.regex is not None:
        params["structured_outputs"] = StructuredOutputsParams(regex=sampling.regex)
    elif isinstance(structured, dict):
        params["structured_outputs"] = StructuredOutputsParams(**structured)
    if masks and params["temperature"] == 0:
        params |= {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    elif masks and params["top_k"] <= 0:
        params["top_k"] = EVERY_ID
    params.setdefault("detokenize", bool(params.get("stop")))
    return params


def with_seed(params: Mapping[str, Any], request: Request) -> SamplingParams:
    """Return one request's `SamplingParams`: the arguments that all requests share, and its own seed and limit."""
    return SamplingParams(**{**params, **own_params(params, request)})


EVERY_ID = 2**31 - 1
"""A `top_k` that keeps every id: vLLM reduces larger ones to the size of its vocabulary."""

NEVER = -100.0
"""The lowest logit bias that vLLM accepts."""


def without_placeholders(params: dict[str, Any], config: VllmConfig) -> dict[str, Any]:
    """Return the parameters with a logit bias of -100 against the tokens that stand for images and videos.

    The model then hardly ever samples a placeholder token. A completion with such a token could not be scored: there
    would be more placeholders than features of images. TRL suppresses these tokens, too, where it samples itself. A
    bias that `params` has already is kept.

    Args:
        params: arguments of `SamplingParams`.
        config: the engine's `VllmConfig`. For a text-only model, or with speculative decoding, for which vLLM takes no
            bias, `params` is returned unchanged.
    """
    if not config.model_config.is_multimodal_model or config.speculative_config is not None:
        return params
    names = "image_token_id", "image_token_index", "video_token_id"
    ids = (getattr(config.model_config.hf_config, name, None) for name in names)
    bias = {token: NEVER for token in ids if isinstance(token, int)}
    return params | {"logit_bias": bias | (params.get("logit_bias") or {})}


def forbidden(params: Mapping[str, Any]) -> list[int]:
    """Return the ids that a logit bias in these arguments of `SamplingParams` forbids.

    vLLM counts these ids among those that a token was sampled from, because their logits stay finite.
    """
    return [int(token) for token, bias in (params.get("logit_bias") or {}).items() if bias <= NEVER]


def own_params(params: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` that are a request's own: its seed, and its token limit if lower."""
    most, least = params["max_tokens"], params.get("min_tokens") or 0
    if request.max_tokens is not None and request.max_tokens < most:
        most, least = request.max_tokens, min(least, request.max_tokens)
    return {"max_tokens": most, "min_tokens": least, "seed": request.seed}


def prompt_of(request: Request) -> dict[str, Any]:
    """Return a request's prompt in vLLM's form, with images as TRL passes them."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
    if request.images is not None:
        prompt["multi_modal_data"] = {"image": request.images if len(request.images) > 1 else request.images[0]}
    return prompt


def refuse_another_prompt(request: Request, theirs: Sequence[int] | None) -> None:
    """Check that vLLM's tokens of a prompt with images are those that the trainer scores.

    Args:
        request: the request with the trainer's tokens; a request without images is not checked.
        theirs: the token ids of the prompt after vLLM has processed its images; None if vLLM does not say.

    Raises:
        EngineError: the tokens differ, or vLLM does not say what they are.
    """
    if request.images is not None and (theirs is None or request.prompt_ids != list(theirs)):
        makes = "does not say which it makes of it" if theirs is None else f"makes {len(theirs)} of it"
        raise EngineError(
            f"A prompt with images has {len(request.prompt_ids)} tokens, and vLLM {makes}. "
            "Prompts come with their image tokens expanded, as the model's processor makes them; where it has made "
            "this one, vLLM expands images of this model differently: generate with engine='transformers'."
        )


def completion_of(output: CompletionOutput) -> Completion:
    """Return one finished output of vLLM as a `Completion`."""
    token_ids = list(output.token_ids)
    if output.logprobs is None:
        return Completion(token_ids=token_ids, finish_reason=output.finish_reason)
    ranked = [sorted(position.items(), key=lambda item: item[1].rank) for position in output.logprobs]
    logprobs = [[None if math.isnan(lp.logprob) else lp.logprob for _, lp in position] for position in ranked]
    ids = [[token for token, _ in position] for position in ranked]
    return Completion(token_ids=token_ids, logprobs=logprobs, logprob_token_ids=ids, finish_reason=output.finish_reason)
