"""Helpers for tests: comparisons with stock TRL."""
