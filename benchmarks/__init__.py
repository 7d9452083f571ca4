"""Benchmarks: each alternates its arms in one run and writes a result that `benchmarks check` compares with goals.

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
    "defaults",
    "in_flight",
    "checks",
    "learning",
    "real",
    "capacity",
    "long_context",
    "multiturn",
    "agents",
    "reshard",
    "reshard_plan",
    "ray_dispatch",
)
"""The modules of this package with a `main`, in the order in which they are listed."""
