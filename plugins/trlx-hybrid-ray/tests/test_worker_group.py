"""Groups of real actors on two simulated nodes, held against groups in this process."""

import os
import pickle
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from trlx_hybrid.errors import ConfigError
from trlx_hybrid_ray.placement import PlacementRequest, reserve
from trlx_hybrid_ray.worker_group import (
    DeadlineError,
    DispatchError,
    LocalWorkerGroup,
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
    register,
    this_worker,
)

sys.path.insert(0, str(Path(__file__).parent))
import group_workers
from group_workers import Echo, Trouble, alike, batches

property_test = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
RANKS = {1: 3, 2: 4}
HALF_A_CPU = [{"num_cpus": 0.5}]
KINDS = [pytest.param(WorkerGroup, id="ray"), pytest.param(LocalWorkerGroup, id="local")]


@pytest.fixture(scope="module", autouse=True)
def nodes(session_cluster):
    """Ray's ids of the two nodes. Actors do not find test modules, so they get classes by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(group_workers)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield tuple(session_cluster.nodes)
    cloudpickle.unregister_pickle_by_value(group_workers)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def echoes(nodes):
    """By tensor-parallel size, (a Ray group, the same group in this process): 3 replicas of one rank, 2 of two."""
    on = [{"num_cpus": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in nodes]
    workers = {1: 3, 2: [on[0], on[0], on[1], on[1]]}
    with ExitStack() as stack:
        yield {
            tp: [
                stack.enter_context(kind(Echo, given, kwargs={"offset": 7}, tensor_parallel=tp))
                for kind in (WorkerGroup, LocalWorkerGroup)
            ]
            for tp, given in workers.items()
        }


@pytest.fixture(scope="module", params=KINDS)
def trouble(request, nodes):
    """Shared: whatever a method raises, the group goes on."""
    with request.param(Trouble, HALF_A_CPU * 3) as group:
        yield group


def both(groups, call):
    """What a call gives, and what every worker saw of it: equal in both groups."""
    (result, seen), (local_result, local_seen) = [(call(group), group.log()) for group in groups]
    assert alike(seen, local_seen)
    assert alike(result, local_result)
    return result


# --- the same as in this process ------------------------------------------------------------------------------------


@property_test
@given(case=batches(), tp=st.sampled_from([1, 2]), name=st.sampled_from(["scatter", "through_itself", "later"]))
def test_scattered_batches_come_back_whole(echoes, case, tp, name):
    _, batch = case

    def called(group):
        result = getattr(group, name)(batch)
        return result.result() if name == "later" else result

    assert alike(both(echoes[tp], called), batch)


def test_all_ranks_of_a_replica_get_its_chunk(echoes):
    for group in echoes[2]:
        assert group.scatter(list(range(5)), more="x") == list(range(5))
        assert group.log() == [[([0, 1, 2], "x")]] * 2 + [[([3, 4], "x")]] * 2


@property_test
@given(case=batches(), tp=st.sampled_from([1, 2]), second=st.sampled_from(["scatter", "later"]))
def test_a_future_can_be_the_batch_of_another_call(echoes, case, tp, second):
    _, batch = case

    def chained(group):
        result = getattr(group, second)(group.later(batch))
        return result if second == "scatter" else result.result()

    assert alike(both(echoes[tp], chained), batch)


@property_test
@given(case=batches(), tp=st.sampled_from([1, 2]), name=st.sampled_from(["broadcast", "one_to_all", "rank_zero"]))
def test_whole_arguments_reach_everyone_or_rank_zero(echoes, case, tp, name):
    _, value = case
    result = both(echoes[tp], lambda group: getattr(group, name)(value))
    expected = [(rank, value) for rank in range(RANKS[tp])] if name == "one_to_all" else (0, value)
    assert alike(result, expected)


def test_workers_know_their_place_and_got_the_constructors_arguments(echoes, nodes):
    for tp, groups in echoes.items():
        for group in groups:
            members, offsets, pids = zip(*group.who(), strict=True)
            assert [(m.rank, m.replica, m.tensor_rank, m.world) for m in members] == [
                (rank, rank // tp, rank % tp, RANKS[tp]) for rank in range(RANKS[tp])
            ]
            assert set(offsets) == {7}
        *_, pids = zip(*groups[0].who(), strict=True)
        assert [at.pid for at in groups[0].locations] == list(pids)
        assert len(set(pids)) == len(groups[0]) == RANKS[tp]
    assert [at.node for at in echoes[2][0].locations] == [nodes[0]] * 2 + [nodes[1]] * 2


@pytest.mark.parametrize("elements", [4, 1 << 16], ids=["inline", "stored"])
def test_what_a_worker_changes_stays_with_it(echoes, elements):
    for group in echoes[1]:
        item = {"list": [0] * elements, "tensor": torch.zeros(elements), "array": np.zeros(elements)}
        refused = group.spoil(item)
        assert refused == [[("array", "ValueError")]] * 3
        assert (item["list"][0], item["tensor"][0].item(), item["array"][0]) == (0, 0.0, 0.0)


@pytest.mark.parametrize("elements", [4, 1 << 16], ids=["inline", "stored"])
def test_what_came_back_is_the_callers_own(echoes, elements):
    for group in echoes[1]:
        first, second = group.one_to_all(torch.zeros(elements))[:2], group.one_to_all(np.zeros(elements))[:2]
        first[0][1][0] = 5
        assert first[1][1][0] == 0
        assert not second[0][1].flags.writeable


def test_wrong_arguments_are_refused_here(echoes):
    for group in echoes[1]:
        with pytest.raises(TypeError, match="missing a required argument: 'value'"):
            group.one_to_all()
        with pytest.raises(TypeError, match="unexpected keyword argument 'sclae'"):
            group.one_to_all(1, sclae=2)
        with pytest.raises(TypeError, match="takes its first argument by position"):
            group.scatter(batch=[1])
        with pytest.raises(TypeError, match="Pass its result"):
            group.one_to_all(group.later([1]))
        with pytest.raises(AttributeError, match=r"'_saw' is not registered.*Methods: broadcast, later"):
            _ = group._saw
        with pytest.raises(AttributeError, match="no 'scater'"):
            _ = group.scater
        group.log()


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_an_exception_names_worker_method_and_node_and_keeps_the_traceback(trouble):
    with pytest.raises(WorkerError) as caught:
        trouble.raise_on([1])
    error = caught.value
    assert isinstance(error.__cause__, KeyError)
    assert (error.rank, error.method) == (1, "raise_on")
    assert error.node in str(error)
    assert str(error).startswith("Trouble.raise_on failed on rank 1 (")
    assert "no such key on 1" in str(error)
    assert 'raise KeyError(f"no such key on' in error.traceback
    assert trouble.raise_on([]) == [0, 1, 2]  # the group goes on


def test_all_that_failed_are_named(trouble):
    with pytest.raises(WorkerError, match=r"(?s)on rank 0 .*Failed as well: ranks 2 \(KeyError: 'no such key on 2'\)"):
        trouble.raise_on([0, 2])


def test_a_future_fails_when_it_is_asked_and_every_time(trouble):
    future = trouble.raise_later([1, 2, 3])
    for _ in range(2):
        with pytest.raises(WorkerError, match="three"):
            future.result()
    assert future.done()


def test_who_waits_for_a_failed_future_hears_the_first_reason(trouble):
    with pytest.raises(WorkerError, match=r"Trouble.raise_later failed on rank 2 .*ValueError: three"):
        trouble.after(trouble.raise_later([1, 2, 3])).result()


def test_a_deadline_names_who_is_missing(trouble):
    with pytest.raises(DeadlineError, match=r"No answer to Trouble.sleep_on within 2 s from rank 1 .*; 2 of 3 workers"):
        trouble.sleep_on(1, 2.5)
    assert trouble.raise_on([]) == [0, 1, 2]


def test_a_future_can_be_asked_again_after_a_deadline(trouble):
    future = trouble.sleep_later(2.0)
    with pytest.raises(TimeoutError, match=r"within 0.05 s from rank 0 .*0 of 3 workers answered"):
        future.result(timeout=0.05)
    assert not future.done()
    assert future.result(timeout=60) == [0, 1, 2]
    assert future.done()


def test_results_that_do_not_fit_together_are_refused(trouble):
    with pytest.raises(DispatchError, match="has no rows and differs, 2 of chunk 0 and 1 of chunk 1"):
        trouble.lengths([1, 2, 3, 4])


@pytest.mark.parametrize("kind", KINDS)
def test_a_constructor_that_raises_is_named_and_nobody_stays(kind):
    with pytest.raises(WorkerError, match=r"Trouble.__init__ failed on rank 1 \(.*OSError: rank 1 has no disk"):
        kind(Trouble, HALF_A_CPU * 2, (1,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_leaves_ends_the_group(kind):
    with kind(Trouble, HALF_A_CPU * 2) as group:
        with pytest.raises(WorkerDiedError, match=r"Trouble rank 1 .* died while Trouble.leave_on was called"):
            group.leave_on(1)
        with pytest.raises(WorkerDiedError, match=r"rank 1 .* died while Trouble.leave_on"):
            group.pid()


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_group_says_so_and_has_done_what_it_was_given(kind, tmp_path):
    with kind(Trouble, HALF_A_CPU * 2) as group:
        group.note(str(tmp_path / "done"))
    assert {file.name for file in tmp_path.iterdir()} == {"done0", "done1"}
    with pytest.raises(ConfigError, match="This group of Trouble was closed"):
        group.pid()


def test_an_error_in_the_block_ends_workers_at_once():
    futures, pids = [], []

    def interrupted():
        with WorkerGroup(Trouble, HALF_A_CPU * 2) as group:
            pids.extend(group.pid())
            futures.append(group.sleep_later(60.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(WorkerError, match=r"was closed before Trouble.sleep_later was done on all 2 workers"):
        futures[0].result(timeout=60)
    assert gone(pids)


def test_a_dead_worker_is_named_though_another_failed_by_it(tmp_path):
    """Rank 1 dies, rank 2 fails because of it, rank 0 hangs; what waits behind that never begins."""
    group = WorkerGroup(Trouble, HALF_A_CPU * 3)
    pids = group.pid()
    before = group.note(str(tmp_path / "before"))
    dying = group.die_on(1)
    waiting = group.note(str(tmp_path / "after"))
    with pytest.raises(WorkerDiedError) as caught:
        dying.result(timeout=60)
    assert caught.value.rank == 1
    assert f"pid {pids[1]}" in str(caught.value)
    assert "Failed as well: ranks 2 (ConnectionResetError: connection reset by peer)" in str(caught.value)
    for late in (waiting.result, group.pid):
        with pytest.raises(WorkerDiedError, match=r"rank 1 .* died while Trouble\.die_on was called"):
            late()
    assert before.result() == [None, None, None]
    group.close()
    assert gone(pids)
    assert not (tmp_path / "after0").exists()


def gone(pids):
    """Whether the processes end within a minute."""
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_killed_process_is_named():
    with WorkerGroup(Trouble, HALF_A_CPU * 2) as group:
        pids = group.pid()
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(
            WorkerDiedError, match=f"Trouble rank 0 .*pid {pids[0]}.* died while Trouble.pid was called"
        ):
            group.pid()


def test_workers_that_find_no_room_are_named_within_the_deadline():
    class Thirsty:
        @register("broadcast")
        def drink(self): ...

    with pytest.raises(DeadlineError, match=r"Thirsty.__init__ within 1 s from rank 0, rank 1; 0 of 2") as caught:
        WorkerGroup(Thirsty, [{"num_gpus": 1000}] * 2, start_deadline=1)
    assert caught.value.__notes__[-1].startswith("Free in the cluster: {'CPU': ")


def test_a_name_that_the_group_needs_is_refused():
    class Closing:
        @register("broadcast")
        def close(self): ...

    with pytest.raises(ConfigError, match=r"Closing.close cannot be registered"):
        LocalWorkerGroup(Closing, 1)


def test_errors_survive_being_sent_on():
    error = DeadlineError("too late", rank=3, method="score", node="here", traceback="in line 1")
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), vars(sent)) == (DeadlineError, "too late", vars(error))


# --- where workers run ----------------------------------------------------------------------------------------------


class Where:
    @register("one_to_all")
    def seen(self):
        return this_worker().gpus, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")


def test_a_group_runs_where_it_was_placed(two_nodes):
    with (
        reserve(PlacementRequest(name="other", gpus=1)),
        reserve(PlacementRequest(name="pairs", replicas=2, size=2, gpus=1, strategy="spread")) as placed,
        WorkerGroup(Where, placed, tensor_parallel=2) as group,
    ):
        assert [at.node for at in group.locations] == [placed.bundle(rank).node.id for rank in range(4)]
        seen = group.seen()
        assert [list(gpus) for gpus, _ in seen] == [visible for _, visible in seen]
        for replica in (0, 1):  # which of them has which is Ray's choice
            pair = [gpu for gpus, _ in seen[2 * replica : 2 * replica + 2] for gpu in gpus]
            assert sorted(pair) == sorted(placed.bundle(2 * replica).gpus)


@pytest.mark.parametrize(("workers", "tensor_parallel"), [(4, 3), (0, 1), (4, 0), (2, 4), ([], 1)])
def test_replicas_must_divide(workers, tensor_parallel):
    with pytest.raises(ConfigError, match=f"tensor_parallel={tensor_parallel}"):
        LocalWorkerGroup(Echo, workers, tensor_parallel=tensor_parallel)


# --- process groups -------------------------------------------------------------------------------------------------


class Summing:
    """Forms a process group in its constructor, as a worker that trains does."""

    def __init__(self):
        this_worker().init_process_group()

    @register("scatter")
    def total(self, rows):
        total = torch.tensor(float(sum(rows)))
        torch.distributed.all_reduce(total)
        return total.item()

    @register("one_to_all")
    def environment(self):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
        return [os.environ.get(name) for name in names]

    @register("one_to_all")
    def accelerate(self):
        state = PartialState(cpu=True)
        return state.process_index, state.num_processes


def test_workers_on_two_nodes_form_a_process_group(nodes):
    on = [
        {"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        for node in (nodes[0], nodes[1], nodes[0])
    ]
    with WorkerGroup(Summing, on) as group, WorkerGroup(Summing, 2) as other:
        assert group.total([1, 2, 3, 4]) == 10.0
        assert other.total([1, 2]) == 3.0  # a group of its own
        gpus = [at.gpus[0] for at in group.locations]
        assert group.environment() == [
            ["0", "3", "0", "2", f"{gpus[0]},{gpus[2]}"],
            ["1", "3", "0", "1", gpus[1]],
            ["2", "3", "1", "2", f"{gpus[0]},{gpus[2]}"],
        ]
        assert group.accelerate() == [(0, 3), (1, 3), (2, 3)]


def test_a_worker_of_a_process_group_has_one_gpu(nodes):
    with pytest.raises(WorkerError, match=r"1 workers of one node have GPUs .*, .*: give each exactly one"):
        WorkerGroup(Summing, [{"num_gpus": 2}])


def test_a_local_worker_forms_a_group_of_one_and_several_do_not():
    with LocalWorkerGroup(Summing, 1) as group:
        assert group.total([1, 2]) == 3.0
    torch.distributed.destroy_process_group()
    with pytest.raises(WorkerError, match="3 workers in one process form no process group"):
        LocalWorkerGroup(Summing, 3)
