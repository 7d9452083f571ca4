"""The command `trlx-hybrid reshard-plan`, which estimates the cost of a weight sync between two layouts from a model's
config alone. A training run uses only its advice."""
