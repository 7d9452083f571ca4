"""A game for GRPO: guess a number."""
