"""Groups of many workers: the driver calls one relay per node."""

import dataclasses
import os
import re
import sys
import time

import pytest
import ray
from trlx_hybrid_ray.worker_group import DeadlineError, Future, WorkerDiedError, WorkerError
from trlx_hybrid_ray.worker_group.group import GroupMethod
from trlx_hybrid_ray.worker_group.registration import register, registered, worker_class
from trlx_hybrid_ray.worker_group.workers import Workers

NODES, PER_NODE = 4, 256


class Worker:
    """Stands in for many ranks: one actor answers for a node's worth of them."""

    def __init__(self):
        self.order = []

    @register("one_to_all")
    def note(self, number):
        self.order.append(number)
        return len(self.order)

    @register("one_to_all", execute="future")
    def note_later(self, number):
        self.order.append(number)

    @register("rank_zero")
    def numbers(self):
        return self.order

    @register("scatter", execute="future")
    def item_or_fault(self, batch):
        if batch == [300]:
            raise ValueError("three hundred")
        return batch

    @register("scatter", execute="future")
    def item_or_wait(self, batch, gate):
        while batch == [700] and not os.path.exists(gate):
            time.sleep(0.01)
        return batch

    @register("scatter")
    def rows(self, batch):
        return batch

    @register("rank_zero", execute="future")
    def leave(self):
        os._exit(1)


class Wide:
    """1,024 ranks on 4 nodes, as far as the driver can tell: relays and workers are real, 256 ranks share an actor."""

    def __init__(self):
        self.actors = actors = Workers(worker_class(Worker, local=False), [{"num_cpus": 0}] * NODES, 1, (), {})
        actors.start(60.0)
        actors.world = actors.replicas = NODES * PER_NODE
        actors.handles = [handle for handle in actors.handles for _ in range(PER_NODE)]
        actors.locations = [
            dataclasses.replace(at, node=f"node {node}")
            for node, at in enumerate(actors.locations)
            for _ in range(PER_NODE)
        ]
        self.actors.relay(60.0, pinned=False)
        for name, method in registered(Worker).items():
            setattr(self, name, GroupMethod(method, self.actors, 60.0))


@pytest.fixture(scope="module")
def by_value(session_cluster):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def groups(by_value):
    """What was made so far; the last one may be broken."""
    made = []
    yield made
    for group in made:
        group.actors.close(at_once=True)


@pytest.fixture
def wide(groups):
    if not groups or groups[-1].actors.lost is not None:
        groups.append(Wide())
    return groups[-1]


@pytest.fixture
def submitted(monkeypatch):
    """Every call of an actor, and every put, that this process makes from here on."""
    from ray.actor import ActorHandle

    calls = []
    call, put = ActorHandle._actor_method_call, ray.put
    monkeypatch.setattr(ActorHandle, "_actor_method_call", lambda *a, **k: (calls.append("call"), call(*a, **k))[1])
    monkeypatch.setattr(ray, "put", lambda *a, **k: (calls.append("put"), put(*a, **k))[1])
    return calls


def test_the_driver_calls_each_node_once(wide, submitted):
    assert wide.rows(list(range(1024))) == list(range(1024))
    assert submitted == ["call"] * NODES


def test_large_arguments_are_put_once_for_all_nodes(wide, submitted):
    before = wide.note("x" * 200_000)
    assert len(before) == 1024
    assert sorted(submitted) == ["call"] * NODES + ["put"]
    assert wide.numbers().pop() == "x" * 200_000


def test_rows_of_a_batch_come_back_in_order(wide):
    assert wide.rows(list(range(5000))) == list(range(5000))
    assert wide.rows(list(range(10))) == list(range(10))


def test_calls_reach_workers_in_the_order_in_which_they_were_made(wide):
    wide.note("start")
    futures = [wide.note_later(number) for number in range(3)]
    order = wide.numbers()
    order = order[len(order) - order[::-1].index("start") :]
    assert order == [number for number in range(3) for _ in range(PER_NODE)]
    assert [len(future.result()) for future in futures] == [1024] * 3


def test_errors_name_the_rank(wide):
    failing = wide.item_or_fault(list(range(1024)))
    expected = r"Worker.item_or_fault failed on rank 300 \(node .*ValueError: three hundred"
    with pytest.raises(WorkerError, match=expected) as caught:
        failing.result()
    assert isinstance(caught.value.__cause__, ValueError)
    assert wide.rows(list(range(1024))) == list(range(1024))


def test_a_deadline_names_the_ranks_that_are_missing(wide, tmp_path):
    """Rank 700 waits for a file; the 67 ranks after it, which share its actor, wait behind it."""
    waiting = wide.item_or_wait(list(range(1024)), str(tmp_path / "gate"))
    message = ""
    for _ in range(60):  # until all others have answered
        with pytest.raises(DeadlineError) as caught:
            waiting.result(timeout=0.5)
        message = str(caught.value)
        if "956 of 1024 workers answered" in message:
            break
    assert re.search(r"within 0.5 s from rank 700 \(.*rank 701 .*rank 702 .* and 65 more; 956 of 1024", message)
    (tmp_path / "gate").touch()
    assert waiting.result(timeout=60) == list(range(1024))


def test_a_future_through_relays_can_be_a_batch(wide):
    future = wide.item_or_fault([0] * 1024)
    assert isinstance(future, Future)
    assert wide.rows(future) == [0] * 1024
    with pytest.raises(WorkerError, match=r"Worker.item_or_fault failed on rank 300 .*three hundred"):
        wide.rows(wide.item_or_fault(list(range(1024))))


def test_a_dead_worker_ends_a_wide_group(wide):
    with pytest.raises(WorkerDiedError, match=r"Worker rank 0 .* died while Worker.leave was called"):
        wide.leave().result()
    with pytest.raises(WorkerDiedError, match=r"Worker\.leave"):
        wide.note(1)
