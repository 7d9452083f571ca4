"""The environment variables by which the ranks of an engine find each other, and a warning where they wait too long.

vLLM's "external_launcher" executor reads these variables.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trlx_hybrid.interprocess.environment_variables import restored

logger = logging.getLogger(__name__)

LATE_SECONDS = 300.0
"""Seconds after which the start of an engine of several ranks is reported as late.

An engine of 7B with CUDA graphs takes two minutes.
"""


@contextmanager
def launcher_environment(rank: int, local_rank: int, world: int, address: str | None = None) -> Iterator[None]:
    """Set, inside the context, the environment variables from which vLLM's "external_launcher" executor builds an
    engine.

    The executor joins the process group that accelerate made. For a single process it makes a group of its own, whose
    store is given port 0 and so takes a free one: a port chosen earlier could be taken by another program meanwhile.

    Args:
        address: this host's address for an engine that runs on several hosts, passed on as `VLLM_HOST_IP`; None leaves
            the choice to vLLM. vLLM takes the address of this host's route to the internet. If that route uses another
            network than the job, or does not exist, the ranks wait for each other without end.
    """
    wanted: dict[str, int | str] = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world}
    if "MASTER_PORT" not in os.environ or world == 1:
        wanted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        wanted |= {"TORCHELASTIC_USE_AGENT_STORE": "False"}  # torchrun's store: with it, nobody would listen there
    elif "VLLM_HOST_IP" not in os.environ and address is not None:
        wanted["VLLM_HOST_IP"] = address
    # vLLM sets the last by itself.
    with restored(*wanted, "VLLM_ENABLE_V1_MULTIPROCESSING"):
        os.environ.update({name: str(value) for name, value in wanted.items()})
        yield


def address_of_this_host(gather: Callable[[Any], list[Any]]) -> str | None:
    """Return this host's address on the network by which the job's ranks reach the host of rank 0. Collective.

    None where all ranks are on that host, or no rank can resolve `MASTER_ADDR`.

    A host may resolve its own name to a loopback address (`127.0.1.1` in `/etc/hosts`). Then the address that the other
    ranks found for the host is returned.

    Args:
        gather: an all-gather of Python objects: takes this rank's object, and returns those of all ranks.
    """
    own, known = address_towards(os.environ.get("MASTER_ADDR", ""))
    others = [address for address in gather(known) if address is not None and not _loops(address)]
    if own is None or not others:
        return None
    return others[0] if _loops(own) else own


def address_towards(host: str) -> tuple[str | None, str | None]:
    """Return this machine's own address on the network by which it reaches `host`, and the address of `host`.

    Nothing is sent. Both are None where the host's name cannot be resolved.
    """
    try:
        family, kind, *_, at = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(at)
            return str(probe.getsockname()[0]), str(at[0])
    except OSError:
        return None, None


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@contextmanager
def told_when_late(ranks: int, seconds: float = LATE_SECONDS) -> Iterator[None]:
    """Log a warning if the code inside, which builds an engine of several ranks, has not ended after so many seconds.

    vLLM itself waits for the other ranks without end, and without a message. With one rank nothing is logged.
    """
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
