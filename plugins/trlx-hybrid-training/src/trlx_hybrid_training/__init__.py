"""The training half of a step: log-probs without padding, no shared work done twice, LoRA layers in fewer passes."""
