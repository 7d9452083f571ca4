"""What is said of the syncs, on a clock of the test's own."""

import logging

import pytest
from trlx_hybrid_reshard.sync import LIMIT, SEEN, SHOWN, WARM, SyncLog


@pytest.fixture
def run(capsys, caplog):
    """Let syncs of so many seconds end every ten; what was printed and what was logged."""

    def after(durations, rank=0, level=logging.WARNING):
        with caplog.at_level(level, logger="trlx_hybrid_reshard.sync"):
            log = SyncLog(rank, lambda: "Do less.")
            for number, seconds in enumerate(durations):
                log.done(10.0 * number - seconds, 10.0 * number, f"transferred={number}GB")
        return capsys.readouterr().err.splitlines(), [(r.levelname, r.message) for r in caplog.records]

    return after


def test_the_first_syncs_are_shown_without_any_set_up(run):
    printed, logged = run([0.5] * (SHOWN + 4))
    assert printed == [f"[Reshard] duration=0.500s, transferred={number}GB" for number in range(SHOWN)]
    assert logged == []


def test_all_are_logged_and_none_is_said_twice(run):
    printed, logged = run([0.5] * 5, level=logging.INFO)
    assert printed == []
    assert logged == [("INFO", f"[Reshard] duration=0.500s, transferred={number}GB") for number in range(5)]


def test_other_ranks_print_nothing(run):
    assert run([3.0] * 20, rank=1) == ([], [])


def test_a_tenth_of_an_iteration_is_warned_about_once_and_only_when_warm(run):
    _, logged = run([9.0] * WARM + [0.9] * 5 + [2.0] * (SEEN - 1) + [0.9] + [2.0] * 10)
    assert logged == [("WARNING", "[Reshard] Resharding takes 20% of an iteration, 2 s of 10 s. Do less.")]


def test_one_slow_sync_among_others_is_no_news(run):
    assert run([10 * LIMIT] * 20)[1] == []
    assert run([0.5, 0.5, 5.0, 5.0] * 5)[1] == []
