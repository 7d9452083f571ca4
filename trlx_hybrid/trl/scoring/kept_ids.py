"""Scoring over the kept ids, the ids that the sampling settings top-k, top-p and min-p leave for each token. The module
says whether a run computes log-probs over the kept ids only, and returns the kept ids for the rows of a rollout.

If sampling leaves ids out, the engine's log-probs are normalised over the kept ids, and the trainer's over all ids.
GRPO's importance-sampling correction multiplies each row's loss by the product of the tokens' ratios, the trainer's
probability divided by the engine's. With `top_k=50` on a flat model, that product is 8e-13 at 200 tokens. If the
trainer scores over the same ids, the ratio is 1, and the gradient is the gradient of the distribution that was sampled
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...contract.support import BOUNDS, WORDS, Support, mask_words
from ...errors import ComponentError, ConfigError

if TYPE_CHECKING:
    from ...contract.types import Sampling
    from ..stock import StockTrainer

FACT = "scored over"
"""The key in a recording's facts (`recording.json`) that is set where log-probs were computed over only the ids that
truncated sampling kept; its value is the sampling setting that left the other ids out."""

TRUNCATION = "ratio/truncation"
"""The metric: mean logarithm, in nats, of the probability that the ids which top-k, top-p and min-p kept have together
in the whole distribution, over the sampled tokens."""

MOST = 16 << 30
"""The most bytes of host memory that the lists of kept ids of one rollout may take on a rank. Larger rollouts are
refused."""

WAY_OUT = "Leave the setting out, or set vllm_importance_sampling_correction=False to train without the correction."


def rows_of(trainer: StockTrainer, generated: Any) -> list[Support]:
    """Return the supports of a rollout's rows (for each token, the ids that it was sampled from), and clear them from
    the session.

    Args:
        generated: the result of GRPO's `_generate`.

    Raises:
        ComponentError: the support of a token that is trained on is missing, or is over another number of ids than the
            policy's vocabulary.
        ConfigError: the supports take more than MOST bytes.
    """
    session, (prompt_ids, ids, mask, *_) = trainer.session, generated
    vocabulary = session.policy.base.config.get_text_config().vocab_size
    setting, rows, missing = session.sampling.truncated_by(), [], []
    for number, (prompt, completion) in enumerate(zip(prompt_ids, ids, strict=True)):
        trained = [1] * len(completion) if mask is None else mask[number]
        support = session.supports.of_row(prompt, completion, trained)
        if support is None:
            missing.append(number)
            continue
        if any(wanted and not known for wanted, known in zip(trained, support.sampled, strict=True)):
            missing.append(number)
        elif support.vocabulary not in (0, vocabulary):
            raise ComponentError(f"The engine samples from {support.vocabulary} ids, and the policy has {vocabulary}.")
        rows.append(support)
    session.supports.clear()
    refuse_too_many(len(ids) * max((support.words.nbytes for support in rows), default=0), setting)
    if missing:
        rollout = session.selection.rollout
        raise ComponentError(
            f"The {rollout.component if rollout else 'rollout'} brought {len(missing)} of {len(ids)} rows, the first "
            f"of them row {missing[0]}, without the ids that their tokens were sampled from, and {setting} leaves some "
            f"out. It must hand on `Completion.support`, for the very tokens: report it to its author. {WAY_OUT}"
        )
    return rows


def forecast(sampling: Sampling, rows: int, vocabulary: int) -> str:
    """Return a line, to be printed when the run starts, on how much host memory a rollout's kept ids take, the ids that
    truncated sampling left for each token.

    Args:
        rows: number of rows of a rollout on one rank.
        vocabulary: number of ids.

    Raises:
        ConfigError: `top_k` keeps so many ids that long rows take more than MOST bytes.
    """
    top_k, whole = int(sampling.extra.get("top_k", sampling.top_k)), mask_words(vocabulary)
    words = min(top_k, whole) if top_k > 0 else whole
    largest = 4 * words * rows * sampling.max_tokens
    if top_k > 0:
        refuse_too_many(largest, f"top_k={top_k}")
    most = f"{4 * words} bytes a token at most" + (f", {largest / 2**30:.2g} GiB a rollout" if top_k > 0 else "")
    return f"scoring: over the ids that {sampling.truncated_by()} keeps; they take {most}, in the host's memory"


def refuse_too_many(size: int, setting: str | None) -> None:
    """Refuse a rollout whose lists of kept ids (the ids that top-k, top-p and min-p left for each token) take too much
    host memory.

    Args:
        size: the bytes of these lists on this rank.
        setting: the sampling setting that leaves ids out, for the message.

    Raises:
        ConfigError: the lists take more than MOST bytes.
    """
    if size > MOST:
        raise ConfigError(
            f"The ids that {setting} keeps take {size / 2**30:.3g} GiB for one rollout on a rank, and {MOST >> 30} GiB "
            "is the most. Set a lower top_k (50 takes 200 bytes a token), or have fewer or shorter rows in a rollout: "
            f"per_device_train_batch_size, steps_per_generation, max_completion_length. {WAY_OUT}"
        )


def require(micro_batch: Mapping[str, Any], setting: str | None) -> None:
    """Check that a micro-batch holds, for each token, the ids that truncated sampling (top-k, top-p, min-p) kept, so
    that log-probs can be computed over these ids only.

    Args:
        micro_batch: TRL's tensors, by name; the ids are under the keys WORDS and BOUNDS.
        setting: the sampling setting that left the other ids out, such as "top_k=50"; for the message.

    Raises:
        ConfigError: one of the two keys is missing.
    """
    if not {WORDS, BOUNDS} <= micro_batch.keys():
        raise ConfigError(
            f"{setting} leaves ids out, and this batch does not say which of its tokens' were kept: it was recorded "
            f"without that, or a class of yours has made it anew. {WAY_OUT}"
        )
