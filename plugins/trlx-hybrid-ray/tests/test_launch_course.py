"""Whatever happens in whatever order, a run that fails ends within 30 s, and a run that does not is left alone."""

from signal import SIGINT, SIGKILL, SIGTERM

from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_ray.launch.blame import How, Report
from trlx_hybrid_ray.launch.course import Course, Limits, silent

STEP = 0.2


def failure(rank, now, lost_peer=False):
    return Report(rank=rank, how=How.RAISED, time=now, code=1, error="E", lost_peer=lost_peer)


def finish(course, now, obeys):
    """Run it out: rank r obeys the signals in `obeys[r]`; returns when it was over, and who got which signals."""
    got = {}
    while not course.over(now):
        for rank, which in course.signals(now):
            got.setdefault(rank, []).append(which)
            if which in obeys[rank]:
                course.ended(rank)
                course.clean(rank)
        now += STEP
        assert now < 1000
    return now, got


@given(
    st.lists(st.sampled_from([{SIGTERM, SIGKILL}, {SIGKILL}, set()]), min_size=1, max_size=6),
    st.data(),
)
def test_a_failed_run_ends_in_time_whatever_the_ranks_obey(obeys, data):
    world = len(obeys)
    course = Course(world)
    first = None
    for rank in range(world):
        lost_peer = data.draw(st.booleans())
        if data.draw(st.booleans()) or rank == world - 1:
            first = first if first is not None else 0.0
            course.reported(failure(rank, 0.0, lost_peer), 0.0)
    over, got = finish(course, 0.0, obeys)
    assert over < 30
    for rank, signals in got.items():
        assert signals == ([SIGTERM] if SIGTERM in obeys[rank] else [SIGTERM, SIGKILL])
    assert course.remaining == [rank for rank in range(world) if not obeys[rank]]


def test_a_failure_that_points_at_others_waits_for_theirs():
    course, limits = Course(2), Limits()
    course.reported(failure(0, 0.0, lost_peer=True), 0.0)
    assert course.signals(limits.settle + 1) == []
    course.reported(silent(1, limits.silence + 0.5, limits), limits.silence + 0.5)
    assert course.signals(limits.silence + 0.5) == [(0, SIGTERM), (1, SIGTERM)]
    assert {report.rank for report in course.reports} == {0, 1}


def test_a_vanished_node_is_noticed_while_its_peers_errors_still_wait():
    limits = Limits()
    assert limits.silence + 1 < limits.blame
    assert max(limits.blame, limits.silence + limits.settle) + limits.grace + limits.kill < 30


def test_what_happens_after_the_order_to_stop_is_nobodys_fault():
    course = Course(3)
    course.reported(failure(1, 0.0), 0.0)
    course.signals(5.0)
    course.reported(Report(rank=0, how=How.DIED, time=-1.0), 5.1)
    assert [report.rank for report in course.reports] == [1]


def test_a_finished_run_gets_no_signals():
    course = Course(2)
    for rank in range(2):
        course.reported(Report(rank=rank, how=How.FINISHED, time=0.0, code=0), 0.0)
        assert course.signals(100.0) == []
        assert not course.over(100.0)
        course.ended(rank)
        course.clean(rank)
    assert course.over(100.0)


def test_the_second_interrupt_kills_at_once():
    course = Course(1)
    course.interrupt(SIGINT, 0.0)
    assert course.signals(0.0) == [(0, SIGINT)]
    assert course.signals(1.0) == []
    course.interrupt(SIGINT, 1.0)
    assert course.signals(1.0) == [(0, SIGKILL)]


def test_another_signal_ends_ranks_with_sigterm():
    course = Course(1)
    course.interrupt(SIGTERM, 0.0)
    assert course.signals(0.0) == [(0, SIGTERM)]


def test_a_signal_that_reaches_ranks_before_the_launcher_is_not_their_failure():
    """Batch systems send it to all processes of a job, in any order."""
    course = Course(3)
    course.reported(Report(rank=0, how=How.DIED, time=0.0), 0.0)
    course.reported(Report(rank=1, how=How.NODE_LOST, time=0.1), 0.1)
    course.reported(failure(2, 0.2, lost_peer=True), 0.2)
    for rank in range(3):
        course.clean(rank)
    assert course.signals(0.3) == []
    assert not course.over(0.3)
    course.interrupt(SIGTERM, 1.0)
    assert course.over(1.0)
    assert course.reports == []


def test_a_failure_of_its_own_stays_one_whatever_the_user_does_next():
    course = Course(2)
    course.reported(failure(1, 0.0), 0.0)
    course.interrupt(SIGINT, 1.0)
    assert [report.rank for report in course.reports] == [1]


def test_ranks_that_die_with_nobody_signalling_have_failed():
    course, limits = Course(1), Limits()
    course.reported(Report(rank=0, how=How.DIED, time=0.0), 0.0)
    course.clean(0)
    over, got = finish(course, 0.0, [set()])
    assert limits.settle <= over < limits.settle + 2 * STEP
    assert got == {}
    course.interrupt(SIGTERM, over)
    assert [report.rank for report in course.reports] == [0]
