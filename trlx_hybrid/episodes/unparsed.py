"""Handling of model turns that the tokenizer's parser of tool calls cannot parse. Such a turn counts as plain text. If
the parser fails at all rows of a batch, and at two rows at least, it does not fit the model: the run ends with a
ConfigError.

A model may write text that makes a parser raise: 1,000 brackets are a RecursionError of Python's JSON. TRL 1.16 takes a
turn as plain text where `parse_response` raises a ValueError or a TypeError; any other exception ends the run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .answers import described

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

UNPARSED = "hybrid/turns/unparsed"
"""Name of the metric: number of unparsed turns of a batch, per rank."""

FEWEST = 2
"""Number of consecutive unparsed rows from which on the parser counts as broken; a single one may be the model's
fault."""


class UnparsedTurns:
    """Counts the rows whose turns the parser could not parse, and stops a run whose parser seems broken."""

    def __init__(self) -> None:
        self._in_succession, self._warned = 0, False

    def ended(self, reasons: Sequence[str | None]) -> int:
        """Count the rows of a finished batch whose last turn the parser could not parse, and return their number.

        Args:
            reasons: for each row, the exception that the parser raised, as text; None where the row was parsed.

        Raises:
            ConfigError: the parser raised at every row of this batch, and has raised at two rows or more. Rows of the
                batches directly before count, too, if the parser raised at every row of them.
        """
        raised = [reason for reason in reasons if reason is not None]
        self._in_succession = self._in_succession + len(raised) if len(raised) == len(reasons) else 0
        if self._in_succession >= FEWEST:
            causes = "; ".join(f"{reason:.200} ({n} times)" for reason, n in Counter(raised).most_common(3))
            raise ConfigError(
                f"The parser of the model's turns raised at all {len(reasons)} rows of a batch: {causes}. It is the "
                "tokenizer's `response_template` (or `response_schema`), which trl.chat_template_utils."
                "add_response_schema sets for the templates that TRL knows. Give the processing class one that fits "
                "its chat template."
            )
        if raised and not self._warned:
            self._warned = True
            logger.warning(
                "A turn cannot be parsed and is taken as plain text, without tool calls: %.200s. Such turns are "
                "counted as hybrid/turns/unparsed from here on.",
                raised[0],
            )
        return len(raised)


class ParsingTokenizer:
    """A wrapper of a tokenizer for TRL's `parse_response`: an exception of the tokenizer's parser becomes a ValueError,
    at which TRL takes the turn as plain text.

    Attributes:
        tokenizer: the wrapped tokenizer, to which everything but `parse_response` is passed on.
        reasons: one entry per call of the parser: the exception that would have ended TRL's run, as text; None where
            there was none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.reasons: list[str | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode with the wrapped tokenizer."""
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def parse_response(self, *args: Any, **kwargs: Any) -> Any:
        """Parse sampled tokens with the wrapped tokenizer's `parse_response`, and return the message.

        Raises:
            ValueError: the parser raised any exception but a TypeError, which passes unchanged.
        """
        parse: Callable[..., Any] = self.tokenizer.parse_response
        try:
            message = parse(*args, **kwargs)
        except (ValueError, TypeError):  # TRL handles these: a malformed call
            self.reasons.append(None)
            raise
        except Exception as error:
            self.reasons.append(described(error))
            raise ValueError(described(error)) from error
        self.reasons.append(None)
        return message
