"""Algorithms for GRPO: which groups are trained on, and how much each completion counts."""
