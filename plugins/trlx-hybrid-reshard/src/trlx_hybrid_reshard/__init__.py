"""Resharding between training and rollout layouts: which rank sends which slice of which parameter to whom."""
