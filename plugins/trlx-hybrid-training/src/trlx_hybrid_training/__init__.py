"""The training half of a step: how log-probs, losses and adapters are computed."""
