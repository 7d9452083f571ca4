"""Settings of `scoring="packed"`."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOptions:
    """`HybridConfig.scoring_options` for `scoring="packed"`.

    Attributes:
        packing: score the rows of a micro-batch as one sequence of real tokens, where the model can be packed.
        deferred: take the old log-probs from the first loss forward where it has the weights that they are of, instead
            of a forward pass of their own.
        balanced: give the micro-batches of an optimizer step equally many tokens, where rows are packed and it makes no
            difference to the gradient which of them share a micro-batch.
    """

    packing: bool = True
    deferred: bool = True
    balanced: bool = True

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"scoring_options: {name} is True or False, got {getattr(self, name)!r}.")
