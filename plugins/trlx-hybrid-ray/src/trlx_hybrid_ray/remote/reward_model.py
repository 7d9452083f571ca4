"""A reward model, scored as TRL scores it.

Source: trl 1.16, `GRPOTrainer.__init__` (preparing model and tokenizer) and `_calculate_rewards` (scoring).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSource:
    """Where a worker gets its model from.

    Attributes:
        model: a path or a name on the Hub, which each worker loads, or the model itself, which travels to it.
        processing_class: its tokenizer; None loads the one that belongs to the model.
        model_kwargs: for `from_pretrained`, as `GRPOConfig.model_init_kwargs`.
        chat_template_kwargs: as in `GRPOConfig`.
    """

    model: Any
    processing_class: Any = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def loaded(self) -> RewardModel:
        """On the worker."""
        return RewardModel(self)


class RewardModel:
    """A sequence-classification model with one label, called as a reward function."""

    def __init__(self, source: RewardModelSource) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model, tokenizer = source.model, source.processing_class
        if isinstance(model, str):
            model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, **source.model_kwargs)
        if tokenizer is None:
            shared = ("revision", "trust_remote_code")
            chosen = {name: source.model_kwargs[name] for name in shared if name in source.model_kwargs}
            tokenizer = AutoTokenizer.from_pretrained(getattr(model.config, "_name_or_path", ""), **chosen)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The score is that of the last token that is no padding, which the model finds by this id.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model, self._tokenizer = model.to(self._device), tokenizer
        self._template = dict(source.chat_template_kwargs)

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        """One score per row."""
        import torch

        inputs = self._tokenizer(
            text=[self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)],
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        ).to(self._device)
        with torch.inference_mode():
            logits = self._model(**inputs).logits[:, 0]
        return [float(score) for score in logits.float().tolist()]

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        return str(self._tokenizer.apply_chat_template(prompt + completion, tokenize=False, **self._template))
