"""`trlx-hybrid launch`: run a script on many nodes through Ray, as `accelerate launch` would on one."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from typing import Any

from trlx_hybrid.errors import ConfigError

from .job import Job

EPILOG = """\
examples:
  trlx-hybrid launch --nodes 2 --gpus-per-node 8 --address auto --config_file fsdp.yaml train.py --learning_rate 1e-6
  trlx-hybrid launch --cpu --processes-per-node 2 train.py
  ray job submit --working-dir . -- trlx-hybrid launch --nodes 2 --gpus-per-node 8 train.py

The same file runs without Ray: accelerate launch train.py
"""


def add_command(commands: Any) -> None:
    """Add `launch` to the sub-parsers of a command line; its `run` takes the options, returns the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "launch",
        help="run a script on many nodes through Ray",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=1, metavar="N", help="nodes to run on (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="ranks on each node, one GPU for each")
    add("--cpu", action="store_true", help="ranks without GPUs; needs --processes-per-node")
    add("--processes-per-node", type=int, metavar="N", help="ranks on each node, with --cpu")
    add("--cpus-per-process", type=float, default=1.0, metavar="N", help="CPUs set aside for each rank (default: 1)")
    add("--config_file", "--config-file", metavar="YAML", help="accelerate's config file (default: accelerate's own)")
    add(
        "--accelerate",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="one more argument of `accelerate launch`, e.g. mixed_precision=bf16; may be repeated",
    )
    add(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster to join; `auto` finds the one on this machine (default: RAY_ADDRESS, else a new one here)",
    )
    add("--token-file", metavar="FILE", help="the token of the cluster to join (default: where Ray looks for it)")
    add("--dashboard", action="store_true", help="start Ray's dashboard with a new cluster")
    add("--restart", type=int, default=0, metavar="N", help="after a failure, start again up to N times (default: 0)")
    add("--start-timeout", type=float, default=120.0, metavar="S", help="seconds to wait for processes (default: 120)")
    add("--debug", action="store_true", help="lift the deadlines, and stop in Ray's debugger where a rank fails")
    add("script", help="the file to run")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=run)


def job_of(options: Any) -> Job:
    """What the options ask for.

    Raises:
        ConfigError: they contradict each other, or name no script.
    """
    if options.cpu == (options.gpus_per_node is not None):
        raise ConfigError("Say how many ranks a node has: --gpus-per-node N, or --cpu --processes-per-node N.")
    if options.cpu and options.processes_per_node is None:
        raise ConfigError("--cpu needs --processes-per-node N: how many ranks each node has.")
    if not options.cpu and options.processes_per_node is not None:
        raise ConfigError("--processes-per-node goes with --cpu. On GPUs each rank has one: --gpus-per-node N.")
    if not os.path.isfile(options.script):
        raise ConfigError(f"No script {options.script} in {os.getcwd()}.")
    if options.config_file is not None and not os.path.isfile(options.config_file):
        raise ConfigError(f"--config_file {options.config_file}: no such file.")
    settings: list[str] = []
    for setting in options.accelerate:
        name, equals, value = setting.lstrip("-").partition("=")
        settings += [f"--{name}", value] if equals else [f"--{name}"]
    return Job(
        script=options.script,
        arguments=tuple(options.arguments),
        folder=os.getcwd(),
        nodes=options.nodes,
        processes_per_node=options.processes_per_node if options.cpu else options.gpus_per_node,
        gpus=not options.cpu,
        cpus_per_process=options.cpus_per_process,
        config_file=options.config_file,
        settings=tuple(settings),
        address=options.address or os.environ.get("RAY_ADDRESS") or None,
        restarts=options.restart,
        debug=options.debug,
        start_timeout=options.start_timeout,
    )


def run(options: Any) -> int:
    """Launch; returns the exit code of the rank that failed first, 0 if none did, 128 + n after signal n.

    Raises:
        ConfigError: the options, or accelerate's settings, cannot be.
        ClusterError: no cluster answers, or none can be started.
        PlacementError: the cluster has no room.
        LaunchError: the ranks do not start.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("trlx-hybrid launch runs on Linux. Elsewhere: accelerate launch, on one machine.")
    job = job_of(options)
    _check_debugger(job)
    # Heavy imports only now: `trlx-hybrid --help` and wrong options must not wait for torch.
    from .. import debugging
    from ..cluster import LOCAL, connect
    from .rank_environment import shared_environment
    from .restart import run as run_job

    shared = shared_environment(job)
    local = job.address is None
    wanted: dict[str, Any] = {"dashboard": options.dashboard or job.debug} if local else {}
    try:
        with connect(job.address or LOCAL, token_file=options.token_file, **wanted) as cluster:
            _say(str(cluster))
            if job.debug and debugging.legacy():
                _say(f"debugger: {debugging.attach_command(cluster.address, cluster.token)}")
            return run_job(job, shared, _folder(job), _say)
    except KeyboardInterrupt:
        _say("SIGINT: stopped before the ranks ran.")
        return 128 + signal.SIGINT


def _folder(job: Job) -> str | None:
    """Where ranks work: where we are, unless Ray has unpacked the job's files in another place on each node."""
    import ray

    return None if ray.get_runtime_context().runtime_env.get("working_dir") else job.folder


def _check_debugger(job: Job) -> None:
    """A breakpoint without its debugger is passed over in silence."""
    wanted = os.environ.get("RAY_DEBUG", "1")
    if job.debug and wanted == "1" and importlib.util.find_spec("debugpy") is None:
        raise ConfigError(
            "--debug: Ray's distributed debugger needs debugpy: pip install debugpy. Or use the one in the terminal: "
            "RAY_DEBUG=legacy trlx-hybrid launch --debug …, and `ray debug` beside it."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
