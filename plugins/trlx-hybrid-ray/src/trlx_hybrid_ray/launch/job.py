"""What is to be launched. Frozen, and checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from trlx_hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script, and the processes that it runs in.

    Attributes:
        script: its path as typed, relative to `folder`.
        arguments: what it gets in `sys.argv` after its path.
        folder: working folder of every rank.
        nodes: how many nodes.
        processes_per_node: ranks on each.
        gpus: one GPU for each rank; otherwise they get CPUs only, and see no GPU.
        cpus_per_process: CPUs that Ray sets aside for each rank.
        config_file: accelerate's, or None for its default one.
        settings: further arguments of `accelerate launch`, as on its command line.
        address: of the Ray cluster to join; None starts one on this machine.
        restarts: how many times to start again after a failure.
        debug: no deadlines, and Ray's debugger.
        start_timeout: seconds that Ray may take to start all actors.
    """

    script: str
    arguments: tuple[str, ...] = ()
    folder: str
    nodes: int = 1
    processes_per_node: int
    gpus: bool
    cpus_per_process: float = 1.0
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
        """How many ranks."""
        return self.nodes * self.processes_per_node
