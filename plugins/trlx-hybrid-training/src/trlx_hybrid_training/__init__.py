"""The training half of a step: log-probs without padding, none computed twice, and LoRA layers in fewer passes."""
