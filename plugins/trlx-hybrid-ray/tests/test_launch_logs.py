"""What ranks print is shown whole, in each rank's order, one line per line."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid_ray.launch import logs
from trlx_hybrid_ray.launch.logs import Printer

texts = st.text(alphabet="ab é€\n", max_size=30)


@given(st.lists(texts, min_size=1, max_size=3), st.data())
def test_each_rank_reads_as_it_printed_however_the_pieces_mix(printed, data):
    """No progress bars here: carriage returns are about the screen, not about lines."""
    out = io.BytesIO()
    printer = Printer(len(printed), out, io.BytesIO())
    rest = [text.encode() for text in printed]
    while any(rest):
        rank = data.draw(st.sampled_from([rank for rank, left in enumerate(rest) if left]))
        size = data.draw(st.integers(1, len(rest[rank])))
        printer.write(rank, False, rest[rank][:size])
        rest[rank] = rest[rank][size:]
    printer.close()
    shown = out.getvalue().decode()
    for rank, text in enumerate(printed):
        lines = re.findall(rf"^\[rank {rank}\] (.*)\n", shown, re.MULTILINE)
        assert lines == text.split("\n")[: None if text[-1:] not in ("\n", "") else -1]


def screen(write):
    out, err = io.BytesIO(), io.BytesIO()
    printer = Printer(2, out, err)
    write(printer)
    printer.close()
    return out.getvalue().decode(), err.getvalue().decode()


def test_an_unfinished_line_is_shown_after_a_moment_and_others_do_not_run_into_it(monkeypatch):
    monkeypatch.setattr(logs, "PATIENCE", 0.0)

    def write(printer):
        printer.write(0, False, b"asking: ")
        printer.tick()
        printer.write(1, False, b"done\n")
        printer.write(0, False, b"yes\n")

    assert screen(write)[0] == "[rank 0] asking: \n[rank 1] done\n[rank 0] yes\n"


def test_a_progress_bar_stays_on_its_line():
    def write(printer):
        for share in (0, 50, 100):
            printer.write(0, True, f"\r{share}%".encode())
        printer.write(0, True, b"\n")

    assert screen(write)[1] == "[rank 0] 0%\r[rank 0] 50%\r[rank 0] 100%\n"


def test_a_line_after_a_progress_bar_does_not_overwrite_it():
    def write(printer):
        printer.write(0, True, b"\r10%\r")
        printer.write(1, True, b"hello\n")

    assert screen(write)[1] == "[rank 0] 10%\r\n[rank 1] hello\n"


@pytest.mark.parametrize(("ranks", "prefix"), [(2, "[rank 1] "), (11, "[rank  1] ")])
def test_prefixes_are_as_wide_as_the_widest(ranks, prefix):
    out = io.BytesIO()
    printer = Printer(ranks, out, io.BytesIO())
    printer.write(1, False, b"x\n")
    assert out.getvalue().decode() == f"{prefix}x\n"
