"""A rank that stays away, stalls or is killed: the others end within the deadline, and their errors name it."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ranks import ends

DEADLINE = 2.0  # as in scripts/failing.py
LIVES = r"waited up to 2 s at the start of the weight sync for rank 2, which never entered it. It lives"
FAULTS = {
    "never_enters": LIVES,
    "never_enters_where_it_is_busy": LIVES,
    "never_opens": r"waited up to 2 s at the opening of the weight sync for rank 2, which never entered it",
    "never_compares": r"waited up to 2 s at the comparison of the ranks' models for rank 2, which never entered it. "
    r"It lives",
    "never_compares_and_one_gives_up_first": r"waited up to [24] s at the comparison of the ranks' models for rank 2, "
    r"which never entered it. It lives",
    "stalls": r"did not complete bucket \d+ of \d+ \(deadline 2 s\): the (message|exchange) \w+ rank 2"
    r".* rank 2 answered no roll call",
    "dies": r"did not complete bucket \d+ of \d+ \(deadline 2 s\): the (message|exchange) \w+ rank 2"
    r".* rank 2 answered no roll call",
    "dies_outside": r"waited [\d.]+ s at the start of the weight sync for rank 2, which never entered it. It has died",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """How the first two of three ranks ended, fault by fault; the third ends in the last one of each run."""
    found = [{}, {}]
    for faults in ([fault for fault in FAULTS if fault != "dies_outside"], ["dies_outside"]):
        folder = tmp_path_factory.mktemp("failing")
        ended = ends("failing.py", folder, 3, *faults)
        assert [end.returncode for end in ended] == [0, 0, 9], "\n".join(end.stderr[-3000:] for end in ended)
        for rank, seen in enumerate(found):
            seen |= json.loads((folder / f"rank{rank}.json").read_text())
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_name_it_in_time(seen, fault):
    for rank, report in enumerate(seen):
        assert report[fault]["error"] is not None, report
        assert re.search(f"Rank {rank} {FAULTS[fault]}", report[fault]["error"]), report
        if not fault.startswith(("never_opens", "never_compares")):  # where it is not this engine
            assert report[fault]["peers_lost"]  # or closing it would wait for a rank that does not come
        assert report[fault]["seconds"] < DEADLINE + 30  # a machine may be busy; a hang is longer
