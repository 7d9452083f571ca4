"""A rank opens the file of its events once, however many it writes: 1,000 ranks share one disk."""

import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from trlx_hybrid_trajectories import events

OPENED: list[list[str]] = []  # of the tests that count at the moment; a hook stays as long as its process


def note(event, arguments):
    if event == "open" and OPENED and arguments[2] & os.O_APPEND:  # and not to be read
        OPENED[-1].append(Path(str(arguments[0])).name)


sys.addaudithook(note)


@pytest.fixture
def opened():
    OPENED.append([])
    yield OPENED[-1]
    OPENED.pop()


@pytest.fixture
def session(tmp_path):
    """Rank 7 of 1,000."""
    return SimpleNamespace(
        ranks=SimpleNamespace(rank=7, world=1000),
        args=SimpleNamespace(output_dir=str(tmp_path)),
        header_lines=[],
        step=0,
        training=True,
    )


@pytest.fixture
def lines(tmp_path):
    def read():
        return [json.loads(line)["event"] for line in (tmp_path / "report" / "rank7.jsonl").read_text().splitlines()]

    return read


def test_a_rank_opens_the_file_of_its_events_once(session, opened, lines):
    log = events.EventLog(session, "")
    for count in range(1, 201):
        log.now("rollout", session)
        if count % 50 == 0:
            assert len(lines()) == count + 2  # a run that is killed now keeps them
    log.end()
    assert len(opened) == 1
    assert lines() == ["start"] + ["now"] * 201 + ["end"]


def test_a_forked_process_and_a_copy_open_it_for_themselves(session, opened, lines):
    log = events.EventLog(session, "")
    child = os.fork()
    if child == 0:
        for name in ("rollout", "sync"):
            log.now(name, session)
        os._exit(len(opened))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2  # its parent's and its own
    copy = pickle.loads(pickle.dumps(log))
    for writer in (copy, log, copy):
        writer.now("train", session)
    assert len(opened) == 2
    assert lines() == ["start"] + ["now"] * 6


def test_a_file_that_is_removed_is_made_anew(session, tmp_path, lines):
    """As by a person who makes room on the disk."""
    log = events.EventLog(session, "")
    (tmp_path / "report" / "rank7.jsonl").unlink()
    log.now("rollout", session)
    log.now("train", session)
    assert lines() == ["now", "now"]
