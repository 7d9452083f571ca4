"""The command `trlx-hybrid launch`, which runs a script on the nodes of a Ray cluster, with `accelerate launch` on each
node."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trlx_hybrid.config import LAUNCH_VARIABLE, RESUME_VARIABLE, STARTS_VARIABLE
from trlx_hybrid.errors import ConfigError, listed

from . import debugging, placement_file
from .cluster import LOCAL, connect, hung
from .errors import LaunchError, PlacementError, ScriptError, brief
from .monitor import Monitor
from .placement import SET_ASIDE, Placement, PlacementRequest, reserve
from .printer import Printer, prefixes, say
from .waiting import Handle, Reference, replies

EPILOG = """\
examples:
  trlx-hybrid launch --cpu --processes-per-node 2 train.py
  trlx-hybrid launch --nodes 2 --gpus-per-node 8 --address auto \\
      --config_file fsdp.yaml train.py --learning_rate 1e-6
  ray job submit --working-dir . -- \\
      trlx-hybrid launch --nodes 2 --gpus-per-node 8 train.py

The same file runs without Ray: accelerate launch train.py
"""
RETRY_SECONDS = 2.0  # seconds between two attempts to reserve the resources of a restart
CALL_SECONDS = 60.0  # seconds that an actor may take to start a process

MACHINE = {
    *("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONBREAKPOINT", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "TEMP", "TMP"),
    *("DISPLAY", "XAUTHORITY", "SHELL", "SHLVL", "PWD", "OLDPWD", "_", "TERM", "COLUMNS", "LINES"),
    *("VLLM_HOST_IP", "HOST_IP", "NODE_IP", "NODE_NAME", "POD_IP", "POD_NAME", "MY_POD_IP"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *(RESUME_VARIABLE, LAUNCH_VARIABLE),
}
"""Environment variables that describe a machine, a login or a process rather than a run. They are not passed from the
launcher to the ranks: each node keeps its own values."""
MACHINE_PREFIXES = (
    *("RAY_", "SSH_", "XDG_", "DBUS_", "SYSTEMD_", "INVOCATION_", "JOURNAL_"),
    *("SLURM", "PMI_", "PMIX_", "OMPI_", "MPI_", "PALS_", "KUBERNETES_", "PET_", "TORCHELASTIC_", "TRLX_HYBRID_RAY_"),
)
SET_HERE = {
    "num_machines": "Use --nodes, or --placement.",
    "num_processes": "Use --gpus-per-node, or --processes-per-node with --cpu, or --placement.",
    "max_restarts": "Use --restart, which starts all nodes again.",
    "config_file": "Use --config_file.",
    **dict.fromkeys(("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"), "Leave it out."),
    **dict.fromkeys(("deepspeed_multinode_launcher", "log_dir"), "Leave it out."),
}
"""The arguments of `accelerate launch` that `trlx-hybrid launch` sets itself, by name, each with the advice for a user
who passes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A launch: the script, the nodes and resources for its ranks, and the settings.

    Attributes:
        script: the script's path as typed, relative to `folder`.
        arguments: the script's own arguments, in `sys.argv` after its path.
        folder: working folder of every rank, unless Ray has unpacked the job's files in another one on each node.
        nodes: the number of nodes.
        processes_per_node: ranks on each node.
        gpus: whether each rank gets one GPU; otherwise ranks get CPUs only, and see no GPU.
        cpus_per_process: CPUs that Ray sets aside for each rank.
        only: addresses or ids of the only nodes to use.
        labels: the labels that the nodes must have.
        placement: the path of the `--placement` file, by which the launcher reserves resources for ranks, engines,
            rewards and environments; None where engines, rewards and environments reserve their own when they start.
        others: the requests of the placement file for the resources of engines, rewards and environments.
        config_file: accelerate's config file, or None for its default one.
        settings: further arguments of `accelerate launch`.
        address: the address of the Ray cluster to join; None starts a cluster on this machine.
        restarts: how often all ranks may be started again after a failure.
        debug: whether to run without deadlines, and with Ray's debugger, in which a failing rank stops.
        start_timeout: seconds that Ray may take to start all actors.
    """

    script: str
    arguments: tuple[str, ...] = ()
    folder: str
    nodes: int = 1
    processes_per_node: int
    gpus: bool
    cpus_per_process: float = 1.0
    only: tuple[str, ...] = ()
    labels: Mapping[str, str] | None = None
    placement: str | None = None
    others: tuple[PlacementRequest, ...] = ()
    config_file: str | None = None
    settings: tuple[str, ...] = ()
    address: str | None = None
    restarts: int = 0
    debug: bool = False
    start_timeout: float = 120.0

    def __post_init__(self) -> None:
        flag = "--gpus-per-node" if self.gpus else "--processes-per-node"
        for name, value in (("--nodes", self.nodes), (flag, self.processes_per_node)):
            if value < 1:
                raise ConfigError(f"{name} {value}: at least one is needed.")
        if self.restarts < 0:
            raise ConfigError(f"--restart {self.restarts}: give the number of times to start again, 0 or more.")
        if self.cpus_per_process <= 0:
            raise ConfigError(f"--cpus-per-process {self.cpus_per_process:g}: give each rank more than 0.")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.processes_per_node

    @property
    def request(self) -> PlacementRequest:
        """The job's placement request: a bundle on each node, with the resources of that node's ranks."""
        return PlacementRequest(
            name="rank",
            replicas=self.nodes,
            size=self.processes_per_node,
            gpus=1 if self.gpus else 0,
            cpus=self.cpus_per_process,
            strategy="strict_spread",
            nodes=self.only,
            labels=self.labels,
        )


# --- the command ------------------------------------------------------------------------------------------------------


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `launch` to the sub-parsers of the `trlx-hybrid` command. The parsed options have an attribute `run`: the
    function that takes these options, carries out the command and returns the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "launch",
        help="run a script on many nodes through Ray",
        description="Run a script with `accelerate launch` on every node of a Ray cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, metavar="N", help="number of nodes (default: 1, or as many as --node names)")
    add("--node", action="append", default=[], metavar="NAME", help="IP address or id of a node (repeat for several)")
    add("--gpus-per-node", type=int, metavar="N", help="ranks (and GPUs) per node; required unless --cpu")
    add("--cpu", action="store_true", help="ranks without GPUs; needs --processes-per-node")
    add("--processes-per-node", type=int, metavar="N", help="ranks per node; required with --cpu")
    add("--cpus-per-process", type=float, metavar="N", help="CPUs reserved for each rank (default: 1)")
    add("--placement", metavar="YAML", help="file that says where ranks, engines and rewards go, instead of the above")
    add("--config_file", "--config-file", metavar="YAML", help="accelerate's config file (default: accelerate's own)")
    add(
        "--accelerate",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="another argument of `accelerate launch`, e.g. mixed_precision=bf16 (repeat for several)",
    )
    add(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster to join; `auto` finds the one on this machine (default: RAY_ADDRESS, else a new one here)",
    )
    add("--token-file", metavar="FILE", help="authentication token of the cluster (default: where Ray looks for it)")
    add("--dashboard", action="store_true", help="start Ray's dashboard with a new cluster")
    restart = "after a failure restart all ranks, from the last checkpoint if the script resumes, up to N times"
    add("--restart", type=int, default=0, metavar="N", help=f"{restart} (default: 0)")
    start = "seconds to wait for Ray to start a process on every node (default: 120)"
    add("--start-timeout", type=float, default=120.0, metavar="S", help=start)
    add("--debug", action="store_true", help="no timeouts; a failing rank stops in Ray's distributed debugger")
    add("script", metavar="SCRIPT", help="Python script to run")
    add("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run)


def job_of(options: argparse.Namespace) -> Job:
    """Return the job that the parsed command-line options ask for.

    Raises:
        ConfigError: the options contradict each other, or name a file that does not exist.
    """
    places = _places_of(options) if options.placement is None else _places_in(options)
    if not os.path.isfile(options.script):
        raise ConfigError(f"{options.script}: no such file (working directory {os.getcwd()}).")
    if options.config_file is not None and not os.path.isfile(options.config_file):
        raise ConfigError(f"--config_file {options.config_file}: no such file.")
    settings: list[str] = []
    for setting in options.accelerate:
        name, equals, value = setting.lstrip("-").partition("=")
        name = f"--{name.replace('-', '_')}"
        settings += [name, value] if equals else [name]
    return Job(
        script=options.script,
        arguments=tuple(options.arguments),
        folder=os.getcwd(),
        **places,
        config_file=options.config_file,
        settings=tuple(settings),
        address=options.address or os.environ.get("RAY_ADDRESS") or None,
        restarts=options.restart,
        debug=options.debug,
        start_timeout=math.inf if options.debug else options.start_timeout,
    )


def _places_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `Job` that say where ranks run and with which resources, from the command-line options.
    Used where there is no `--placement` file.

    Raises:
        ConfigError: an option is missing, or two options exclude each other.
    """
    if options.cpu and options.gpus_per_node is not None:
        raise ConfigError("--cpu and --gpus-per-node exclude each other.")
    if not options.cpu and options.gpus_per_node is None:
        raise ConfigError("Say how many ranks a node has: --gpus-per-node N, or --cpu --processes-per-node N.")
    if options.cpu and options.processes_per_node is None:
        raise ConfigError("--cpu needs --processes-per-node N: how many ranks each node has.")
    if not options.cpu and options.processes_per_node is not None:
        raise ConfigError("--processes-per-node needs --cpu. With GPUs, use --gpus-per-node N (one rank per GPU).")
    return {
        "nodes": options.nodes if options.nodes is not None else len(options.node) or 1,
        "processes_per_node": options.processes_per_node if options.cpu else options.gpus_per_node,
        "gpus": not options.cpu,
        "cpus_per_process": 1.0 if options.cpus_per_process is None else options.cpus_per_process,
        "only": tuple(options.node),
    }


def _places_in(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `Job` that say where ranks, engines, rewards and environments run and with which
    resources, read from the `--placement` file.

    Raises:
        ConfigError: the file is wrong, or another option also says where ranks run.
    """
    for name in ("nodes", "node", "gpus_per_node", "cpu", "processes_per_node", "cpus_per_process"):
        if getattr(options, name) not in (None, [], False):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} and --placement {options.placement} both say where ranks go. Leave one out.")
    requests = placement_file.read(options.placement)
    trainer = requests[placement_file.TRAINER]
    return {
        "nodes": trainer.replicas,
        "processes_per_node": trainer.size,
        "gpus": trainer.gpus > 0,
        "cpus_per_process": trainer.cpus,
        "only": tuple(trainer.nodes),
        "labels": trainer.labels,
        "placement": options.placement,
        "others": tuple(placement_file.of_all_ranks(requests, trainer.replicas * trainer.size)),
    }


def run(options: argparse.Namespace) -> int:
    """Run the command `launch`: connect to the cluster, launch the job and return the exit code: the exit code of the
    rank that failed first, 0 if no rank failed, or 128 + n where signal n ended the command.

    Raises:
        ConfigError: the options, or accelerate's settings, are invalid.
        ClusterError: no cluster answers, or none can be started.
        PlacementError: the cluster has no room.
        LaunchError: the ranks do not start.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("trlx-hybrid launch runs on Linux. Elsewhere: accelerate launch, on one node.")
    job = job_of(options)
    os.environ.pop(SET_ASIDE, None)  # set by another launcher, where this one runs in a rank of it
    if job.debug:
        os.environ.setdefault(debugging.CHOICE, debugging.DISTRIBUTED)
        os.environ[debugging.POST_MORTEM] = "1"
    config, arguments = accelerate_arguments(job)
    wanted: dict[str, Any] = {"dashboard": options.dashboard} if job.address is None else {}
    try:
        with connect(job.address or LOCAL, token_file=options.token_file, **wanted) as cluster:
            say(str(cluster))
            code = launch(job, config, arguments, cluster.address)
    except KeyboardInterrupt:
        say("Stopped by SIGINT.")
        code = 128 + signal.SIGINT
    if hung():  # a call of Ray that never returned, because its head hangs, would keep this process alive
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


# --- what accelerate and the ranks are told ---------------------------------------------------------------------------


def accelerate_arguments(job: Job) -> tuple[str, tuple[str, ...]]:
    """Return the settings with which every node runs `accelerate launch`: the text of accelerate's config file, and the
    arguments that are the same on all nodes.

    Args:
        job: the launch.

    Raises:
        ConfigError: accelerate does not know an argument, or the settings contradict the launch, such as TPUs.
    """
    import yaml  # type: ignore[import-untyped]

    path = Path(job.config_file) if job.config_file is not None else _default_config()
    default = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "no"}
    text = path.read_text() if path is not None else json.dumps(default | {"use_cpu": not job.gpus})
    try:
        config = yaml.safe_load(text)
        kind = str(config.get("distributed_type", "NO"))
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ConfigError(f"accelerate's config file {path} is not valid YAML ({where}).") from error
    except (yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"accelerate's config file {path} is not a YAML mapping.") from error
    names = {setting.partition("=")[0] for setting in job.settings if setting.startswith("--")}
    if kind in ("XLA", "TPU") or "--tpu" in names:
        raise ConfigError("accelerate's settings want TPUs. trlx-hybrid launch starts ranks on GPUs or CPUs.")
    if config.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(f"accelerate's config file {path} is for SageMaker. Use one for your own nodes.")
    for name, way_out in SET_HERE.items():
        if f"--{name}" in names:
            raise ConfigError(f"--accelerate {name}: set by trlx-hybrid launch. {way_out}")
    if job.settings:
        _check_settings(job.settings)
    chosen = names & {"--use_fsdp", "--use_deepspeed", "--use_megatron_lm", "--multi_gpu"}
    several = ["--multi_gpu"] if job.world > 1 and kind in ("NO", "MULTI_CPU") and not chosen else []
    return text, (
        *("--num_machines", str(job.nodes), "--num_processes", str(job.world)),
        *("--rdzv_backend", "static", "--deepspeed_multinode_launcher", "standard"),  # each node's own, in our order
        *several,
        *job.settings,
    )


def _default_config() -> Path | None:
    """Return the path of the config file that `accelerate config` wrote, or None where there is none."""
    from huggingface_hub.constants import HF_HOME

    path = Path(HF_HOME) / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def _check_settings(settings: tuple[str, ...]) -> None:
    from accelerate.commands.launch import launch_command_parser

    def refuse(message: str) -> None:
        raise ConfigError(f"accelerate launch: {message}. `accelerate launch --help` lists what --accelerate takes.")

    parser = launch_command_parser()
    parser.error = refuse
    parser.parse_args([*settings, "script.py"])


def variables(job: Job, run_id: str, start: int) -> dict[str, str]:
    """Return the environment variables that all ranks get: the variables of this process, and the variables that this
    command sets. Variables that describe this machine, such as PATH, are left out.

    Args:
        job: the launch.
        run_id: an id of this launch, the same at every restart.
        start: 0 for the first start, n for the n-th restart. Restarted ranks resume from a checkpoint.
    """
    told = {n: v for n, v in os.environ.items() if n not in MACHINE and not n.startswith(MACHINE_PREFIXES)}
    told |= {"PET_RDZV_ID": run_id, STARTS_VARIABLE: str(start)}
    if os.environ.get(RESUME_VARIABLE) != "1":  # otherwise even the first start resumes a run of another launch
        told[LAUNCH_VARIABLE] = run_id
    told |= debugging.variables()
    if not job.gpus and job.config_file is None:
        told["ACCELERATE_USE_CPU"] = "true"
    if start:
        told[RESUME_VARIABLE] = "1"
    return told


# --- from the first start to the last ---------------------------------------------------------------------------------


def launch(job: Job, config: str, arguments: tuple[str, ...], head: str) -> int:
    """Run a job to its end, restarts included, on the cluster that this process is connected to. Returns the exit code.

    Each start has new processes and a new rendezvous. From the second start on, ranks find TRLX_HYBRID_RESUME=1 in
    their environment. A run that the user stopped, or whose script cannot be found, is not started again.

    Args:
        config, arguments: the text of accelerate's config file, and the arguments that are the same on all nodes; from
            `accelerate_arguments`.
        head: host:port of the cluster's head.

    Raises:
        PlacementError: the resources are not available at the first start.
        LaunchError: the ranks do not start, or the resources are not available again in time after a failure.
    """
    run_id = secrets.token_hex(8)
    # Closed last, so that nothing stays reserved because of a blocked terminal.
    with Printer(prefixes(job.nodes, job.processes_per_node), sys.stdout.buffer, sys.stderr.buffer) as printer:
        for start in range(job.restarts + 1):
            last = start == job.restarts
            try:
                with ExitStack() as stack:
                    placement, *others = _places(job, start, printer, stack)
                    monitor = stack.enter_context(Monitor(placement, head, printer, job.debug))
                    told = variables(job, run_id, start)
                    _start_ranks(job, [placement, *others], monitor.actors, config, arguments, told)
                    code, again = monitor.until_over()
            except ScriptError:
                raise
            except LaunchError as error:
                if last:
                    raise
                printer.say(str(error))
                code, again = 1, True
            if not again:
                break
            if not last:
                printer.say(f"Starting again ({start + 1} of {job.restarts}), from the last checkpoint.")
            elif job.restarts:
                printer.say(f"That was the last of {job.restarts} restarts.")
    return code


def _places(job: Job, start: int, printer: Printer, stack: ExitStack) -> list[Placement]:
    """Reserve the resources for the ranks, engines, rewards and environments of the run, and print where they are.
    Either all resources are reserved or none. At a restart, the reservation is tried again for `start_timeout` seconds:
    Ray may need a moment to notice which resources are free again, and a lost node may need time to come back.

    Args:
        job: the launch, with the requests for resources.
        start: 0 for the first start, n for the n-th restart.
        printer: prints the map of ranks and nodes.
        stack: an `ExitStack`, which gives the resources back when it is closed.

    Returns:
        The placement of the ranks, followed by one for each request in `job.others`, in order.

    Raises:
        PlacementError: the resources are not available at the first start.
        LaunchError: they are not available again in time at a restart.
    """
    deadline = time.monotonic() + job.start_timeout
    while True:
        try:
            with ExitStack() as kept:
                wanted = [job.request, *job.others]
                found = {r.name: kept.enter_context(reserve(r)) for r in placement_file.in_order(wanted)}
                stack.enter_context(kept.pop_all())
            for request in wanted:
                printer.say(str(found[request.name]))
            return [found[request.name] for request in wanted]
        except PlacementError as error:
            if start == 0:
                raise
            if time.monotonic() > deadline:
                raise LaunchError(f"It cannot be started again within {job.start_timeout:g} s: {error}") from error
            time.sleep(RETRY_SECONDS)


def _start_ranks(
    job: Job,
    placements: Sequence[Placement],
    actors: Sequence[Handle],
    config: str,
    arguments: tuple[str, ...],
    told: Mapping[str, str],
) -> None:
    """Start the ranks: have the actor of every node start `accelerate launch` there.

    Args:
        job: the launch.
        placements: the placement of the ranks, then those that the placement file reserves for engines, rewards and
            environments.
        actors: for each node of the ranks' placement, the handle of its `NodeActor`.
        config, arguments: the text of accelerate's config file, and the arguments that are the same on all nodes; from
            `accelerate_arguments`.
        told: the environment variables that every rank gets, from `variables`.

    Raises:
        LaunchError: a rank's node does not start, or does not answer in time.
    """
    import ray

    placement, *others = placements
    _answers(placement, [actor.pid.remote() for actor in actors], job.start_timeout, "Raise --start-timeout.")
    address = placement.bundles[0].node.address
    port = 0  # accelerate takes a free one by itself
    if job.nodes > 1:
        (port,) = _answers(placement, [actors[0].free_port.remote(address)], CALL_SECONDS)
        answers = _answers(placement, [actor.reach.remote(address, port) for actor in actors], CALL_SECONDS)
        for bundle, why in zip(placement.bundles, answers, strict=True):
            if why is not None:
                raise LaunchError(
                    f"Node {bundle.node.name} does not reach port {port} of {address}, where the rendezvous of the "
                    f"ranks is to be: {why}. Open the ports between the nodes: torch.distributed uses ports chosen at "
                    "random. `trlx-hybrid doctor --ray` tries them."
                )
    common = {
        "script": job.script,
        "config": config,
        "folder": None if ray.get_runtime_context().runtime_env.get("working_dir") else job.folder,
        "alone": job.world == 1,
    }
    script = ["--module", "trlx_hybrid_ray.debugged_rank", job.script] if job.debug else [job.script]
    calls = []
    for number, (actor, bundle) in enumerate(zip(actors, placement.bundles, strict=True)):
        own = ("--machine_rank", str(number), "--main_process_ip", address, "--main_process_port", str(port))
        words = (*arguments, *own, *script, *job.arguments)
        ranks = range(number * job.processes_per_node, (number + 1) * job.processes_per_node)
        own_told = dict(told)
        if job.placement is not None:
            own_told[SET_ASIDE] = placement_file.told(others, job.world, ranks, job.placement)
        calls.append(actor.start.remote(words, gpus=bundle.gpus, first_rank=ranks.start, variables=own_told, **common))
    _answers(placement, calls, CALL_SECONDS)


def _answers(
    placement: Placement, calls: Sequence[Reference], seconds: float, way_out: str = "See the logs of its raylet."
) -> list[Any]:
    """Wait for one answer from the actor of each node, and return the answers in the order of the nodes.

    Args:
        placement: the placement of the ranks, with the names of the nodes.
        calls: Ray's references to the answers, one for each node.
        seconds: the limit for all answers together.
        way_out: advice for the user, appended to the message about a late answer.

    Raises:
        ScriptError: a node lacks the script.
        LaunchError: a node is lost or late; the message names it.
    """
    import ray

    found, late = {}, []
    for number, answer in replies(dict(enumerate(calls)), seconds):
        where = placement.bundles[number].node.name
        if isinstance(answer, ray.exceptions.GetTimeoutError):
            late.append(where)
        elif isinstance(answer, ray.exceptions.RayTaskError):
            raise answer.cause if isinstance(answer.cause, LaunchError) else LaunchError(str(answer)) from answer
        elif isinstance(answer, ray.exceptions.RayError):
            raise LaunchError(f"Node {where} was lost while its ranks were started: {brief(answer)}") from answer
        found[number] = answer
    if late:
        raise LaunchError(f"No answer within {seconds:g} s from node {listed(late)}. {way_out}")
    return [found[number] for number in range(len(calls))]
