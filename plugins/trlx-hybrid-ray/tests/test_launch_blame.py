"""The failure that is named is the one that the others followed from."""

import pytest
from trlx_hybrid_ray.launch.blame import How, Report, first_failure, is_consequence


def raised(rank, time, lost_peer=False):
    return Report(rank=rank, how=How.RAISED, time=time, code=1, error="E", lost_peer=lost_peer)


def died(rank, time):
    return Report(rank=rank, how=How.DIED, time=time)


@pytest.mark.parametrize(
    ("reports", "victim"),
    [
        ([raised(0, 10.0), raised(1, 9.0)], 1),
        ([raised(0, 9.999, lost_peer=True), died(1, 10.0)], 1),  # the peer noticed before the warden did
        ([raised(0, 10.0), died(1, 10.2)], 0),  # aborted by NCCL's watchdog, after rank 0 left
        ([raised(0, 10.0, lost_peer=True), raised(2, 11.0, lost_peer=True)], 0),
        ([Report(rank=0, how=How.FINISHED, time=1.0, code=0), raised(1, 2.0)], 1),
        ([Report(rank=0, how=How.SILENT, time=5.0), raised(1, 2.0, lost_peer=True)], 0),
    ],
)
def test_the_first_cause_is_found(reports, victim):
    assert first_failure(reports).rank == victim
    assert first_failure(reports[::-1]).rank == victim


def test_nothing_is_blamed_where_all_finished():
    assert first_failure([Report(rank=r, how=How.FINISHED, time=1.0, code=0) for r in range(3)]) is None


LOST = [
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:17"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:2094, remote process exited or there was a network error"),
    RuntimeError("Rank 0 waited up to 2 s at the start of the weight sync for rank 2, which never entered it"),
]
OWN = [
    ValueError("reward function returned nan"),
    RuntimeError("CUDA out of memory while compiling: implicit success"),
    KeyError("connection"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_errors_about_a_lost_peer_are_known(error):
    assert is_consequence(error)
    wrapped = ValueError("cannot gather rewards")
    wrapped.__cause__ = error
    assert is_consequence(wrapped)


@pytest.mark.parametrize("error", OWN, ids=str)
def test_other_errors_are_a_ranks_own(error):
    assert not is_consequence(error)
    error.__cause__ = error  # a chain that bites its tail ends all the same
    assert not is_consequence(error)
