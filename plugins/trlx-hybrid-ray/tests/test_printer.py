"""What ranks print is shown whole, in each rank's order, one line per line; and nothing about it ends a run."""

import io
import os
import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trlx_hybrid_ray import printer
from trlx_hybrid_ray.printer import Printer

texts = st.text(alphabet="ab é€\n", max_size=30)
NAMES = {(0, rank): f"[rank {rank}] " for rank in range(3)}


def shown(write):
    """What is on the terminal after `write(printer)`: standard output, standard error."""
    out, err = io.BytesIO(), io.BytesIO()
    one = Printer(NAMES, out, err)
    write(one)
    assert one.close(30)
    return out.getvalue().decode(), err.getvalue().decode()


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=3), st.data())
def test_each_rank_reads_as_it_printed_however_the_pieces_mix(printed, data):
    """No progress bars here: carriage returns are about the screen, not about lines."""

    def write(one):
        rest = [text.encode() for text in printed]
        while any(rest):
            rank = data.draw(st.sampled_from([rank for rank, left in enumerate(rest) if left]))
            size = data.draw(st.integers(1, len(rest[rank])))
            one.write((0, rank, False), rest[rank][:size])
            rest[rank] = rest[rank][size:]

    out, _ = shown(write)
    for rank, text in enumerate(printed):
        lines = re.findall(rf"^\[rank {rank}\] (.*)\n", out, re.MULTILINE)
        assert lines == text.split("\n")[: None if text[-1:] not in ("\n", "") else -1]


def test_an_unfinished_line_is_shown_after_a_moment_and_others_do_not_run_into_it(monkeypatch):
    monkeypatch.setattr(printer, "PATIENCE", 0.05)
    out, deadline = io.BytesIO(), time.monotonic() + 30
    with Printer(NAMES, out, io.BytesIO()) as one:
        one.write((0, 0, False), b"asking: ")
        while out.getvalue() != b"[rank 0] asking: ":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        one.write((0, 1, False), b"done\n")
        one.write((0, 0, False), b"yes\n")
    assert out.getvalue() == b"[rank 0] asking: \n[rank 1] done\n[rank 0] yes\n"


def test_a_progress_bar_stays_on_its_line():
    def write(one):
        for share in (0, 50, 100):
            one.write((0, 0, True), f"\r{share}%".encode())
        one.write((0, 0, True), b"\n")

    assert shown(write)[1] == "[rank 0] 0%\r[rank 0] 50%\r[rank 0] 100%\n"


def test_a_line_after_a_progress_bar_does_not_overwrite_it():
    def write(one):
        one.write((0, 0, True), b"\r10%\r")
        one.write((0, 1, True), b"hello\n")

    assert shown(write)[1] == "[rank 0] 10%\r\n[rank 1] hello\n"


def test_what_the_launcher_says_stands_after_what_a_rank_had_begun():
    out = io.BytesIO()
    with Printer(NAMES, out, out) as one:
        one.write((0, 0, False), b"sum 3")
        one.say("Rank 1 failed first")
    assert out.getvalue() == b"[rank 0] sum 3\nRank 1 failed first\n"


@pytest.mark.parametrize("size", [200_000, 20_000_000])
def test_a_line_without_an_end_takes_no_longer_than_one_with(size):
    started = time.monotonic()

    def write(one):
        for _ in range(0, size, 4096):
            one.write((0, 0, False), b"x" * 4096)

    out, _ = shown(write)
    assert out.count("x") >= size
    assert out.count("\n") == 1
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("how", ["closed pipe", "full disk"])
def test_a_terminal_that_takes_no_more_is_told_once_and_the_run_goes_on(how, capsys):
    if how == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
        out = open(writing, "wb")  # noqa: SIM115
    else:
        out = open("/dev/full", "wb")  # noqa: SIM115
    err = io.BytesIO()
    one = Printer(NAMES, out, err)
    for _ in range(100):
        one.write((0, 0, False), b"lost\n" * 10_000)
    one.write((0, 1, True), b"seen\n")
    assert one.close(30)
    assert err.getvalue() == b"[rank 1] seen\n"
    said = capsys.readouterr().err
    assert said.count("standard output takes no more") == 1
    out.close()


def test_a_terminal_that_blocks_holds_up_nobody_else():
    reading, writing = os.pipe()
    with open(reading, "rb") as terminal:
        reader = threading.Thread(target=terminal.read)
        with open(writing, "wb") as out:
            one = Printer(NAMES, out, io.BytesIO())
            for _ in range(20):
                one.write((0, 0, False), b"x" * (4 << 20))
            assert not one.has_room
            assert not one.close(0.2)
            reader.start()
            assert one.close(60)
        reader.join()
