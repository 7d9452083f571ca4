"""The ranks of a script beside these tests, which may import what lies here."""

import os
from pathlib import Path

from trlx_hybrid.testing.processes import rank_reports, start_ranks, wait_all

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE)}


def reports(script, folder, count, *arguments):
    """What each rank wrote; all must end well."""
    return rank_reports(HERE / "scripts" / script, folder, *arguments, count=count, environment=ENVIRONMENT)


def ends(script, folder, count, *arguments):
    """How each rank ended; a hang ends in TimeoutError."""
    return wait_all(
        start_ranks(HERE / "scripts" / script, folder, *arguments, count=count, environment=ENVIRONMENT), 400
    )
