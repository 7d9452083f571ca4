"""How the ranks of an engine find each other: what vLLM's "external_launcher" executor reads, and where they wait."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trlx_hybrid.variables import restored

logger = logging.getLogger(__name__)

LATE_SECONDS = 300.0
"""An engine of 7B with CUDA graphs takes two minutes."""


@contextmanager
def launcher_environment(rank: int, local_rank: int, world: int) -> Iterator[None]:
    """What vLLM's "external_launcher" executor reads from the environment, set while the engine is built.

    That executor joins the process group that accelerate made, or makes one of a single process, whose store takes a
    free port by itself: one that was looked for before would be anybody's until the engine listens there.

    The ranks of an engine over several hosts meet at an address that vLLM takes from the route to the internet. Where
    that is another network than the job's, or there is none, they would wait for each other without end.
    """
    wanted: dict[str, int | str] = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world}
    if "MASTER_PORT" not in os.environ or world == 1:
        wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        wanted |= {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # torchrun's, with which nobody would listen there
    elif "VLLM_HOST_IP" not in os.environ and (address := address_towards(os.environ.get("MASTER_ADDR", ""))):
        wanted["VLLM_HOST_IP"] = address
    # vLLM sets the last by itself.
    with restored(*wanted, "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.update({name: str(value) for name, value in wanted.items()})
        yield


def address_towards(host: str) -> str | None:
    """This machine's own address on the network by which it reaches a host; None where that is itself, or is not
    found. Nothing is sent."""
    try:
        family, kind, *_, at = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(at)
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


@contextmanager
def told_when_late(ranks: int, seconds: float = LATE_SECONDS) -> Iterator[None]:
    """Say so where an engine of several ranks is not there after so many seconds: vLLM waits for the others without an
    end, and without a word."""
    late = threading.Timer(seconds, _say_late, (ranks, seconds))
    late.daemon = True
    if ranks > 1:
        late.start()
    try:
        yield
    finally:
        late.cancel()


def _say_late(ranks: int, seconds: float) -> None:
    logger.warning(
        "vLLM's engine is not up after %g s. Its %d ranks wait for each other, at %s between hosts: a firewall "
        "between them is a usual cause, or a rank that failed. `py-spy dump --pid %d` shows where this one stands.",
        seconds,
        ranks,
        os.environ.get("VLLM_HOST_IP", "the address of the default route"),
        os.getpid(),
    )
