"""Options of the remote engine. The module imports no Ray, so that they can be checked where Ray is not wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trlx_hybrid.errors import ConfigError

from ..placement import STRATEGIES, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Options of the remote engine: `HybridConfig.engine_options` for `engine="remote"`.

    Attributes:
        replicas: the number of engines.
        tensor_parallel_size: the GPUs of each engine, on one node. TRL's `vllm_tensor_parallel_size` fills it.
        gpus: the GPUs that each of an engine's processes takes; by default 1, or 0 where the server computes on CPUs.
        cpus: the CPUs that each of an engine's processes takes.
        strategy: "pack" puts engines on as few nodes as it can, "spread" on as many.
        server: the name of the inference library that samples in the actors: a component of the kind `server`, which a
            plugin offers, such as "vllm".
        server_options: the options of the server. For "vllm" they are the options of `engine="vllm"`. TRL's `vllm_*`
            arguments fill the fields of the same names, except sleep mode: remote engines have memory of their own.
        start_deadline: seconds for engines to start, imports included.
        deadline: seconds that an engine may work without finishing a request; then it counts as dead.
        restarts: how many engines may be replaced in one run; after that the run goes on with the engines that are
            left.
    """

    replicas: int = 1
    tensor_parallel_size: int = 1
    gpus: float | None = None
    cpus: float = 1.0
    strategy: Strategy = "pack"
    server: str = "vllm"
    server_options: Mapping[str, object] = field(default_factory=dict)
    start_deadline: float = 600.0
    deadline: float = 600.0
    restarts: int = 10

    def __post_init__(self) -> None:
        where = "HybridConfig.engine_options for engine 'remote'"
        for name in ("replicas", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}: {name}={getattr(self, name)}: at least one is needed.")
        for name in ("start_deadline", "deadline"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{where}: {name}={getattr(self, name)}: seconds above 0, or math.inf.")
        if self.restarts < 0:
            raise ConfigError(f"{where}: restarts={self.restarts}: 0 or more.")
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"{where}: strategy={self.strategy!r}; choose one of {', '.join(STRATEGIES)}.")
        if self.gpus is not None and not 0 <= self.gpus <= 1:
            raise ConfigError(f"{where}: gpus={self.gpus:g}: each process uses one GPU, a share of one, or none.")
        if "tensor_parallel_size" in self.server_options:
            raise ConfigError(f"{where}: tensor_parallel_size stands beside server_options, not in it.")
