"""Algorithms for GRPO: which groups (the completions of one prompt) are trained on, and how much each completion
counts."""
