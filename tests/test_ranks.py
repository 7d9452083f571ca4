"""Rank 0 does something for all: whatever comes of it, each rank gets it."""

from pathlib import Path

SCRIPT = Path(__file__).parent / "scripts" / "first_rank.py"


def test_no_rank_waits_for_what_the_first_one_cannot_send(two_processes):
    first, second = two_processes(SCRIPT, timeout=100.0)
    for report in (first, second):
        assert report["a value"] == {"rank": 0}
        assert report["nothing"] is None
        assert "pickle" in report["a value that cannot be pickled"]
        assert report["an error that cannot be built again"].endswith("this is wrong")
    assert second["a value that cannot be pickled"].startswith("HybridError: ")
