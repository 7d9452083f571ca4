"""For tests: comparisons with stock TRL."""
