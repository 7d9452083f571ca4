"""The command `trlx-hybrid reshard-plan`, which forecasts the cost of a reshard from a config alone. A run uses only
its advice."""
