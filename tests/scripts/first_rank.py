"""Launched by tests/test_ranks.py on two ranks: rank 0 works for both, and each reports what it got or raised."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from trlx_hybrid.errors import HybridError
from trlx_hybrid.interprocess.ranks import by_first


class NamedError(HybridError):
    """Pickle writes it, and cannot build it again."""

    def __init__(self, *, name):
        super().__init__(f"{name} is wrong")


def failing():
    raise NamedError(name="this")


WORKS = {
    "a value": lambda: {"rank": dist.get_rank()},
    "nothing": lambda: None,
    "a value that cannot be pickled": lambda: lambda: None,
    "an error that cannot be built again": failing,
}


def outcome(work):
    try:
        return by_first(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(folder):
    dist.init_process_group("gloo")
    report = {name: outcome(work) for name, work in WORKS.items()}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
