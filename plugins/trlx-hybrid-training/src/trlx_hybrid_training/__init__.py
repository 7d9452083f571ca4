"""The training half of a step: log-probs without padding, and none computed twice."""
