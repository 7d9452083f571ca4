"""Rollouts: from prompts to completions, with their seeds."""
