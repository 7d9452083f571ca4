"""Real processes for a test: rank 0 to n-1 of a script, over gloo."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def start(script, folder, count, *arguments):
    """The processes of all ranks. Each is to write `folder/rank<rank>.json`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    common = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"WORLD_SIZE": str(count), "PYTHONPATH": str(SCRIPTS.parent)}
    command = [sys.executable, str(SCRIPTS / script), str(folder), *arguments]
    environments = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [subprocess.Popen(command, env=e, stderr=subprocess.PIPE, text=True) for e in environments]


def finish(processes, timeout=120):
    """(exit codes, stderr of each) when all have ended; a hang ends in TimeoutExpired."""
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


def reports(script, folder, count, *arguments):
    """What each rank wrote; all must end well."""
    codes, errors = finish(start(script, folder, count, *arguments))
    assert codes == [0] * count, "\n".join(error[-3000:] for error in errors)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(count)]
