"""The environment of a rank: what `accelerate launch` would set, computed by accelerate itself.

What is used of accelerate beyond its documented interface is all here; a test compares what both launchers set.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from trlx_hybrid.errors import ConfigError
from trlx_hybrid.trl.checkpoint import RESUME_VARIABLE

from .job import Job
from .rank_place import RankPlace

MACHINE = {
    *(
        "PATH",
        "LD_LIBRARY_PATH",
        "PYTHONHOME",
        "PYTHONBREAKPOINT",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "CUDA_VISIBLE_DEVICES",
    ),
    *("HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "TEMP", "TMP", "DISPLAY", "XAUTHORITY"),
    *("SHELL", "SHLVL", "PWD", "OLDPWD", "_", "TERM", "COLUMNS", "LINES"),
}
"""Variables that describe a machine or a login, not a run: each node keeps its own."""
MACHINE_PREFIXES = ("RAY_", "SSH_", "XDG_", "DBUS_", "SYSTEMD_", "INVOCATION_", "JOURNAL_")
AT_START = ("PYTHON", "LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
"""Read once, when a process or its first library starts. These go through Ray, which writes them to its logs; all other
variables, tokens and keys among them, reach a rank in a message."""
PORT_LATER = "0"  # accelerate checks that its port is free; ours is held, and set per rank


def accelerate_settings(job: Job) -> tuple[Namespace, Any, bool]:
    """accelerate's own reading of its config file and defaults, for this job.

    Raises:
        ConfigError: accelerate does not accept them; in its words.
    """
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    given = [
        *("--num_processes", str(job.world), "--num_machines", str(job.nodes), "--machine_rank", "0"),
        *("--main_process_ip", "127.0.0.1", "--main_process_port", PORT_LATER),
    ]
    if job.config_file is not None:
        given += ["--config_file", job.config_file]
    elif not os.path.isfile(default_config_file):
        # Its defaults, said aloud: it would warn about each.
        given += [] if "--mixed_precision" in job.settings else ["--mixed_precision", "no"]
        given += [] if "--dynamo_backend" in job.settings else ["--dynamo_backend", "no"]
        given += [] if job.gpus else ["--cpu"]
    try:
        parser = launch_command_parser()
        parser.error = _refuse
        settings, defaults, precision_from_file = _validate_launch_command(
            parser.parse_args([*given, *job.settings, job.script])
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"accelerate refuses its settings: {error}") from error
    if settings.tpu:
        raise ConfigError("accelerate's settings want TPUs. trlx-hybrid launch starts ranks on GPUs or CPUs.")
    return settings, defaults, precision_from_file


def _refuse(message: str) -> None:
    raise ConfigError(f"accelerate launch: {message}. `accelerate launch --help` lists what --accelerate takes.")


def shared_environment(job: Job) -> dict[str, str]:
    """What all ranks of a job have in common: this process's environment, and what accelerate makes of it.

    Raises:
        ConfigError: accelerate refuses the settings.
    """
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    settings, defaults, precision_from_file = accelerate_settings(job)
    try:
        # As `accelerate launch` chooses among its launchers. It counts this machine's GPUs; here the job says.
        if settings.use_deepspeed and not settings.cpu:
            fields = list(defaults.deepspeed_config) if defaults else []
            settings.deepspeed_fields_from_accelerate_config = ",".join(
                [*fields, "mixed_precision"] if precision_from_file else fields
            )
            _, prepared = prepare_deepspeed_cmd_env(settings)
        elif not settings.cpu and (
            settings.use_fsdp or settings.use_megatron_lm or settings.multi_gpu or (job.gpus and job.world > 1)
        ):
            prepared = prepare_multi_gpu_env(settings)
        else:
            _, prepared = prepare_simple_launcher_cmd_env(settings)
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"accelerate refuses its settings: {error}") from error
    return {name: value for name, value in prepared.items() if _travels(name, value)}


def _travels(name: str, value: str) -> bool:
    if name in ("MASTER_ADDR", "MASTER_PORT"):
        return False
    if os.environ.get(name) != value:  # accelerate has set it
        return True
    return name not in MACHINE and not name.startswith(MACHINE_PREFIXES)


def at_start(shared: Mapping[str, str], job: Job) -> dict[str, str]:
    """The part of it that Ray has to set when it starts a rank's process, and what tells Ray what to do."""
    told = {name: value for name, value in shared.items() if name.startswith(AT_START)}
    # Ray would show each actor its own device only, and LOCAL_RANK would point at none.
    told["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    if "RAY_DEBUG" in os.environ:
        told["RAY_DEBUG"] = os.environ["RAY_DEBUG"]
    if job.debug:
        told.setdefault("RAY_DEBUG", "1")
        told["RAY_DEBUG_POST_MORTEM"] = "1"
    return told


def rank_variables(
    place: RankPlace, host: str, port: int, *, run_id: str, start: int, restarts: int
) -> dict[str, str | None]:
    """What torchrun would set for this rank, in its names, and what tells a restarted one so.

    Args:
        place: the rank.
        host, port: of the store that the launcher hosts.
        run_id: the same for all ranks and restarts.
        start: 0 at the first start.
        restarts: how many there may be.
    """
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(start),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "CUDA_VISIBLE_DEVICES": ",".join(place.node_devices),
        RESUME_VARIABLE: "1" if start else None,
    }
