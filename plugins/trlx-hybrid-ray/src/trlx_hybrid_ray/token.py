"""The authentication token that all processes of a Ray cluster share. It is made per run, passed on as the path of a
file, and never stored in the user's home."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trlx_hybrid.interprocess.environment_variables import restored

from .errors import ClusterError
from .internals import LOOPBACK_VARIABLE, reread_environment

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Ray's own variables for authentication: its mode, the token itself, and the path of the token's file. The processes
of a node inherit them, so a path in them must be valid on that node."""


def make(folder: Path) -> Path:
    """Make a random token for a Ray cluster, write it to the new file `token` in a folder, and return the file's path.
    Only the file's owner can read it.

    Raises:
        FileExistsError: the folder has a file of that name.
    """
    path = folder / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def given(environment: Mapping[str, str]) -> bool:
    """Return whether Ray would find a token in this environment: in Ray's variables, or in the file
    `~/.ray/auth_token`.

    Args:
        environment: the environment variables, such as `os.environ`.
    """
    if environment.get(TOKEN) or environment.get(PATH):
        return True
    return (Path(environment.get("HOME", "/nonexistent")) / ".ray" / "auth_token").is_file()


@contextmanager
def presented(path: Path | None, *, everywhere: bool) -> Iterator[None]:
    """Make this process and its children authenticate to Ray with a token, for as long as the context lasts.

    Args:
        path: the token's file; None takes the user's token, from Ray's variables or `~/.ray/auth_token`. Where the user
            has none, or has set RAY_AUTH_MODE, the mode is left as it is.
        everywhere: whether clusters that are started in the context listen on every interface, rather than on loopback
            only.

    Raises:
        ClusterError: the file is missing or empty.
    """
    if path is not None and (not path.is_file() or not path.read_text().strip()):
        raise ClusterError(f"{path} holds no token. Name the file with the one that the cluster was started with.")
    try:
        with restored(MODE, TOKEN, PATH, LOOPBACK_VARIABLE):
            os.environ[LOOPBACK_VARIABLE] = "1" if everywhere else "0"
            if path is not None:
                os.environ.pop(TOKEN, None)  # Ray prefers it to the path
                os.environ.update({MODE: "token", PATH: str(path.resolve())})
            elif given(os.environ):
                os.environ.setdefault(MODE, "token")
            reread_environment()
            yield
    finally:
        reread_environment()
