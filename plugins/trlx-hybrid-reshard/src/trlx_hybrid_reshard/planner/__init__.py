"""The command `trlx-hybrid reshard-plan`, which estimates the cost of a weight sync between two layouts (how trainer
and engines shard the parameters) from a model's config alone. A training run uses only the advice on better layouts."""
