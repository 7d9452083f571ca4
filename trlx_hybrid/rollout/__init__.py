"""Rollouts: the requests for the prompts of a batch, their seeds, and records of what was sampled for them."""
