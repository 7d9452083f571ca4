"""Programs that try to leave the sandbox or to forge their verdict: all, behind each of the walls, as each user."""

import functools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "try_escapes.py"
TABLE = runpy.run_path(str(SCRIPT.with_name("escapes.py")))
USERS = (0, 65534) if os.getuid() == 0 else (os.getuid(),)
NOT_STOPPED_BY_LIMITS = {"environment_of_the_trainer", "file_of_the_user"}  # files that the user may read


@functools.cache
def succeeded(walls, user):
    """What got out, or was forged; a skip where these walls, or this user, are not to be had."""
    done = subprocess.run([sys.executable, str(SCRIPT), walls, str(user)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("walls", ["bubblewrap", "namespaces", "limits"])
def test_no_program_gets_out_and_none_forges_its_verdict(walls, user):
    found = succeeded(walls, user)
    if "missing" in found:
        pytest.skip(found["missing"])
    assert found["tried"] == len(TABLE["OUT"]) + len(TABLE["FORGERIES"])
    assert set(found["succeeded"]) <= (NOT_STOPPED_BY_LIMITS if walls == "limits" else set())
