"""Benchmarks: each runs its arms alternating in one run and leaves a result that `benchmarks check` can hold to goals.

`python -m benchmarks.NAME` runs one and writes `benchmarks/results/NAME-DEVICE.json`; `python -m benchmarks` lists
them; `python -m benchmarks check [NAME ...]` compares the committed results with `goals.toml`.
"""

BENCHMARKS = (
    "host",
    "import_cost",
    "rollout",
    "tail",
    "weight_sync",
    "offload",
    "step",
    "checks",
    "learning",
    "capacity",
    "multiturn",
    "reshard",
    "reshard_plan",
    "ray_dispatch",
)
"""Modules of this package with a `main`, in the order they are listed."""
