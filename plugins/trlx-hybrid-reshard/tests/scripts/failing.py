"""Launched by test_faults.py: three ranks, of which the last one does not do its part. Writes how the others end."""

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from standins import RANK, WORLD, SlicedEngine, session_of
from syncing import sharded
from trlx_hybrid.errors import PeerLostError
from trlx_hybrid_reshard.agreement import Agreement

DEADLINE, CULPRIT = 2.0, 2


def ended(call):
    started = time.monotonic()
    try:
        call()
    except PeerLostError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"error": None, "seconds": time.monotonic() - started}


def never_enters(sync):
    if RANK == CULPRIT:
        time.sleep(1.3 * DEADLINE)
        return None
    return ended(sync.sync)


def never_enters_where_it_is_busy(sync):
    """The same, where it takes a while from gloo's first look at its deadline to our own."""
    stock = dist.all_reduce

    def slow(*args, **kwargs):
        meeting = stock(*args, **kwargs)
        time.sleep(0.2 * DEADLINE)
        return meeting

    dist.all_reduce = slow
    try:
        return never_enters(sync)
    finally:
        dist.all_reduce = stock


def never_opens(sync):
    if RANK == CULPRIT:
        time.sleep(1.3 * DEADLINE)
        Agreement._made += 1  # it would have made one
        return None
    return ended(lambda: Agreement(RANK, WORLD, DEADLINE))


def never_compares(sync, patience=1):
    """Opens a sync of its own with the others, and no more; the groups of others go on."""
    if RANK == CULPRIT:
        Agreement(RANK, WORLD, DEADLINE)
        time.sleep(1.3 * DEADLINE)
        return None
    _, another = session_of(sharded(), SlicedEngine(tp=1), deadline=patience * DEADLINE)
    return ended(another.refuses)


def never_compares_and_one_gives_up_first(sync):
    """The same, where rank 1 reaches its deadline, and gloo closes its connections, long before rank 0's."""
    return never_compares(sync, patience=2 - RANK)


def dies_outside(sync):
    """Before the sync, which the others wait for with patience. Runs alone: it ends the process."""
    if RANK == CULPRIT:
        os._exit(9)
    sync._agreement._deadline = 600.0
    return ended(sync.sync)


def stalls(sync):
    """Agrees on the sync, and moves nothing."""
    if RANK == CULPRIT:
        sync.prepared.run = lambda: time.sleep(1.3 * DEADLINE)
    return ended(sync.sync)


def dies(sync):
    """The same, and is killed before it moves anything."""
    if RANK == CULPRIT:
        sync.prepared.run = lambda: os._exit(9)
    return ended(sync.sync)


def main(folder, faults):
    dist.init_process_group("gloo")
    seen = {}
    for fault in [globals()[name] for name in faults]:
        session, sync = session_of(sharded(), SlicedEngine(tp=1), deadline=DEADLINE, stall=DEADLINE)
        assert sync.refuses() is None
        sync.open()
        session.weight_version += 1
        seen[fault.__name__] = found = fault(sync)
        if found is not None:
            found["peers_lost"] = getattr(session.live_engine, "peers_lost", False)
        if fault not in (dies, dies_outside):
            dist.barrier()  # of the default group, which no fault has touched
    (folder / f"rank{RANK}.json").write_text(json.dumps(seen))
    time.sleep(DEADLINE)  # rank 0 holds the store, in which the others look who is missing
    os._exit(0)  # what is left of the groups would be waited for


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
