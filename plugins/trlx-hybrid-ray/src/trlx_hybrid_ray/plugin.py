"""The entry point by which this package registers the remote engine, the command `launch` and the doctor's Ray checks
with the plugin manager of trlx-hybrid. Imports no Ray and no torch: every plugin is loaded at every start, so loading
must stay cheap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trlx_hybrid.plugins.hookspecs import hookimpl

from .engines.options import RemoteOptions

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace, _SubParsersAction

    from trlx_hybrid.contract.types import Finding
    from trlx_hybrid.plugins.registry import Registry
    from trlx_hybrid.session import Session


def _refuses(session: Session, options: RemoteOptions) -> str | None:
    from .engines.engine import served_by

    component, server_options = served_by(session, options)
    reason = component.refusal(session, server_options)
    staleness = session.config.options("rollout").get("max_staleness")
    if reason is None and staleness and not component.interrupts:
        return (
            f"requests of server {component.name!r} cannot be interrupted, and rollout_options has "
            f"max_staleness={staleness}. Leave it out."
        )
    setting = session.sampling.truncated_by() if session.over_support else None
    if reason is None and setting is not None and not component.keeps:
        return (
            f"server {component.name!r} does not say which ids it kept, and {setting} leaves some out. Leave the "
            "setting out, or set vllm_importance_sampling_correction=False to train without the correction."
        )
    return reason


@hookimpl
def trlx_register(registry: Registry) -> None:
    """Offer the remote engine (`engine="remote"`), which samples on servers, such as vLLM's, in Ray actors."""
    registry.offer(
        "engine",
        "remote",
        "trlx_hybrid_ray.engines.engine:RemoteEngine",
        options=RemoteOptions,
        refuses=_refuses,
        streams=True,
        interrupts=True,
        keeps=True,
        remote=True,
        by_name=True,
        summary="engines in Ray actors, on GPUs of their own or on other nodes",
    )


@hookimpl
def trlx_command(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add `trlx-hybrid launch`, and `--ray` to `trlx-hybrid doctor`."""
    from .doctor import add_options
    from .launch import add_command

    add_command(commands)
    add_options(commands.choices["doctor"])


@hookimpl
def trlx_doctor(options: Namespace) -> Iterator[Finding] | None:
    """Return an iterator that checks a Ray cluster and yields the lines of the doctor's report on it; None without the
    option `--ray` of `trlx-hybrid doctor`."""
    from .doctor import findings

    return findings(options)
