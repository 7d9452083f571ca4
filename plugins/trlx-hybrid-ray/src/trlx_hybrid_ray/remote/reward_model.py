"""Reward models that run in Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RewardModel:
    """A sequence-classification model with one label, called as a reward function and scored as TRL scores it.

    Source: trl 1.16, `GRPOTrainer.__init__` (preparing model and tokenizer) and `_calculate_rewards` (scoring).

    Args:
        model: a path or a name on the Hub, or the model itself.
        tokenizer: the tokenizer; None loads the model's own.
        model_kwargs: arguments of `from_pretrained`.
        chat_template_kwargs: arguments of `apply_chat_template`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, model_kwargs: Mapping[str, object], chat_template_kwargs: Mapping[str, object]
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if isinstance(model, str):
            model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, **model_kwargs)
        if tokenizer is None:
            shared = ("revision", "trust_remote_code")
            chosen = {name: model_kwargs[name] for name in shared if name in model_kwargs}
            tokenizer = AutoTokenizer.from_pretrained(getattr(model.config, "_name_or_path", ""), **chosen)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # The score is the last non-padding token's, which the model finds by this id.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model, self._tokenizer, self._template = model.to(self._device), tokenizer, chat_template_kwargs

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: object) -> list[float]:
        """Return one score per row. Prompts and completions are texts, or conversations in TRL's format; other columns
        are ignored."""
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
        """Return prompt and completion as one text, with the chat template if they are conversations."""
        if isinstance(prompt, str):
            return prompt + str(completion)
        return str(self._tokenizer.apply_chat_template(prompt + completion, tokenize=False, **self._template))
