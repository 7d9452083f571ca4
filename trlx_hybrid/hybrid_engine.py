"""The engine for loops of your own: no trainer, a model, an optimizer, and memory that changes hands.

    engine = HybridEngine(model, tokenizer, optimizer, max_tokens=128, engine_options={"enable_sleep_mode": True})
    for prompts in batches:
        with engine.rollout_context():
            completions = engine.generate(prompts, num_generations=8)
        with engine.train_context():
            loss(model, completions).backward()
            optimizer.step()
            optimizer.zero_grad()

Runs in one process, under `torchrun` and under `accelerate launch`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .config import HybridConfig
from .errors import ConfigError, EngineError, HybridError, StaleWeightsError
from .memory.ledger import torch_optimizer
from .plugins.hookspecs import hookimpl
from .plugins.host import Host, check_ranks_agree
from .plugins.selection import TrainerArguments, select
from .ranks import Ranks
from .session import Session
from .types import Completion, Layout, Phase, Sampling, SyncPlan, SyncReport
from .weights.policy import Policy

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

Start = TypeVar("Start", bound=Callable[[SyncPlan], None])
End = TypeVar("End", bound=Callable[[SyncReport], None])


class HybridEngine:
    """Samples from a live model and gives its memory back for training. A context manager; `close` ends it.

    Args:
        model: what is trained: a transformers or PEFT model, wrapped by accelerate or DDP or not.
        tokenizer: its tokenizer or processor.
        optimizer: its optimizer, whose state then makes room for the KV cache during rollouts; may be left out.
        config: components and their options; the `vllm` engine where nothing is said.
        engine_options: options of the engine, for short.
        rollout: how each engine is split, e.g. `Layout(tp=4)`; as many engines as the processes hold.
        train: how the model is sharded, e.g. `Layout(fsdp=8)`. Changes nothing: it is held against the model.
        sampling: how to sample; `max_tokens` alone is enough for most.
        accelerator: the one of your loop; made here otherwise.
        mixed_precision: "bf16" or "fp16" where the loop trains an fp32 model under autocast: the engine then computes
            in that. Read from the accelerator by default.
        seed: of all sampling.
        plugins: objects with hook implementations, beside the installed ones.

    Attributes:
        session: the live objects, shared with every hook.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: HybridConfig | None = None,
        engine_options: dict[str, Any] | None = None,
        rollout: Layout | None = None,
        train: Layout | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        accelerator: Accelerator | None = None,
        mixed_precision: str | None = None,
        seed: int = 0,
        plugins: Sequence[object] = (),
    ) -> None:
        from accelerate import Accelerator

        if (sampling is None) == (max_tokens is None):
            raise ConfigError("HybridEngine takes either sampling=Sampling(...) or max_tokens=, exactly one of them.")
        if config is not None and engine_options is not None:
            raise ConfigError("HybridEngine takes engine_options= only without config=; put them into the config.")
        config = config or HybridConfig(engine_options=engine_options)
        config = dataclasses.replace(config, engine=config.engine or "vllm")
        if config.scoring is not None:
            raise ConfigError("HybridEngine scores nothing, your loop does: leave HybridConfig.scoring out.")
        if config.router_replay:
            raise ConfigError("HybridEngine trains nothing, your loop does: leave HybridConfig.router_replay out.")
        if config.record is not None or config.replay is not None or config.rollout_only:
            raise ConfigError("HybridEngine trains nothing: leave record, replay and rollout_only out of HybridConfig.")
        if rollout is not None:
            config = with_rollout(config, rollout)
        host = Host.load(config.disable_plugins or (), plugins)
        selection = select(config, TrainerArguments(engine_options={}), host.registry)
        if selection.stock:
            raise ConfigError("HybridEngine needs an engine other than 'transformers': HybridConfig(engine='vllm').")
        accelerator = accelerator or Accelerator(cpu=next(model.parameters()).device.type == "cpu")
        if accelerator.distributed_type.value == "DEEPSPEED":
            raise ConfigError(
                "HybridEngine does not read DeepSpeed's parameters. Train with GRPOTrainer, or use FSDP2."
            )
        ranks = Ranks(accelerator)
        if rollout is not None:
            check_rollout(rollout, ranks.world)
        if train is not None:
            check_train(train, model, ranks.world)
        check_ranks_agree(ranks.gather(host.plugins))
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)
        self._steps, self._closed = 0, False
        self.session = Session(
            host,
            config,
            selection,
            args=_arguments(optimizer, mixed_precision or accelerator.mixed_precision, seed),
            sampling=sampling or Sampling(max_tokens=max_tokens or 0, logprobs=0),
            policy=Policy(
                lambda: model, tokenizer, next(model.parameters()).device, fsdp_version=fsdp and fsdp.fsdp_version
            ),
            ranks=ranks,
            step=lambda: self._steps,
            optimizer=lambda: torch_optimizer(optimizer),
        )

    @contextmanager
    def rollout_context(self, training: bool = True) -> Iterator[None]:
        """Memory goes to the engine, with the model's current weights in it; collective.

        Args:
            training: False for evaluation, which shares no random draws with training.

        Raises:
            StaleWeightsError: inside another rollout.
            EngineError: after `close`.
        """
        if self._closed:
            raise EngineError("This HybridEngine was closed, and its memory is free: make a new one.")
        with self.session.rollout_phase(training):
            yield

    def generate(self, prompts: Sequence[list[int]], num_generations: int = 1) -> list[Completion]:
        """`num_generations` completions per prompt, those of one prompt next to each other; inside `rollout_context`.

        Args:
            prompts: token ids.

        Raises:
            StaleWeightsError: outside of a rollout, or the weights changed within it.
            EngineError: a prompt is longer than the context.
        """
        if self.session.phase is not Phase.ROLLOUT:
            raise StaleWeightsError("generate() outside of rollout_context(), in which the engine is awake and synced.")
        repeated = [prompt for prompt in prompts for _ in range(num_generations)]
        return self.session.generate(repeated, num_generations=num_generations)

    @contextmanager
    def train_context(self) -> Iterator[None]:
        """The memory is the trainer's; what happened to the weights inside reaches the engine at the next rollout."""
        if self.session.phase is not Phase.TRAIN:
            raise StaleWeightsError("train_context() inside rollout_context(): leave the rollout before training.")
        try:
            yield
        finally:
            self._steps += 1
            self.session.versions.changed()

    def on_reshard_start(self, function: Start) -> Start:
        """Decorator: call `function(plan)` before weights are brought into the engine."""
        self._listen("trlx_sync_start", lambda plan: _called(function, "on_reshard_start", plan))
        return function

    def on_reshard_end(self, function: End) -> End:
        """Decorator: call `function(report)` when the engine holds the model's weights."""
        self._listen("trlx_sync_end", lambda report: _called(function, "on_reshard_end", report))
        return function

    def _listen(self, hook: str, function: Callable[..., None]) -> None:
        host = self.session.host
        listener = SimpleNamespace(**{hook: hookimpl(function, trylast=True)})  # in the order of their registration
        host.register(listener, f"reshard-listener-{len(host.plugins)}")

    def state_dict(self) -> dict[str, Tensor]:
        """The model's own state dict, every tensor in memory of its own: safe to keep while training goes on.

        Raises:
            StaleWeightsError: inside `rollout_context`, where the model may have left the device.
        """
        if self.session.phase is not Phase.TRAIN:
            raise StaleWeightsError("state_dict() inside rollout_context(): leave the rollout before saving.")
        return {name: t.detach().clone() for name, t in self.session.policy.module.state_dict().items()}

    def save_state(self, folder: str | Path) -> None:
        """Write, on rank 0, what a resume needs beside model and optimizer, which `accelerator.save_state` writes."""
        if self.session.ranks.rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.session.save_state(Path(folder))

    def load_state(self, folder: str | Path) -> None:
        """Take up what `save_state` wrote, after the model was loaded. On every rank."""
        self.session.load_state(Path(folder), self._steps)
        self._steps = self.session.versions.version

    def close(self) -> None:
        """Free the engine; the model keeps its weights. Safe to call twice.

        Raises:
            StaleWeightsError: inside `rollout_context`.
        """
        if self.session.phase is not Phase.TRAIN:
            raise StaleWeightsError("close() inside rollout_context(): leave the rollout before closing.")
        self._closed = True
        self.session.close()

    def __enter__(self) -> HybridEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _arguments(optimizer: torch.optim.Optimizer | None, precision: str, seed: int) -> SimpleNamespace:
    """What components read of a trainer's arguments."""
    arguments = SimpleNamespace(seed=seed, bf16=precision == "bf16", fp16=precision == "fp16", optim="sgd")
    if optimizer is not None:
        inner = torch_optimizer(optimizer)
        name = type(inner).__name__.lower()
        arguments.optim = {"adam": "adamw_torch", "adamw": "adamw_torch", "adamw8bit": "adamw_8bit"}.get(name, name)
        arguments.learning_rate = max(group["lr"] for group in inner.param_groups)
    return arguments


def _called(function: Callable[..., None], moment: str, what: SyncPlan | SyncReport) -> None:
    try:
        function(what)
    except Exception as error:  # the loop's own, not a plugin's to be reported to its author
        name = getattr(function, "__qualname__", function)
        raise HybridError(f"{name}, called {moment}, raised {type(error).__name__}: {error}") from error


def with_rollout(config: HybridConfig, rollout: Layout) -> HybridConfig:
    """The config with the engine's parallelism in its options.

    Raises:
        ConfigError: an engine cannot have this layout, or the options say something else.
    """
    if rollout.fsdp > 1:
        raise ConfigError(f"rollout={rollout}: engines are not sharded by FSDP. Give tp, the ranks of one engine.")
    if rollout.pp > 1:
        raise ConfigError(
            f"rollout={rollout}: pipeline stages can be planned (`trlx-hybrid reshard-plan`), not run yet: the ranks "
            "of an engine share its requests over tp alone. Use tp."
        )
    options = config.options("engine")
    given = options.setdefault("tensor_parallel_size", rollout.tp)
    if given != rollout.tp:
        raise ConfigError(f"rollout={rollout}, and the engine's options say tensor_parallel_size={given}. Give one.")
    return dataclasses.replace(config, engine_options=options)


def check_rollout(rollout: Layout, world: int) -> None:
    """That the processes can hold such engines.

    Raises:
        ConfigError: they cannot.
    """
    if world % rollout.tp:
        raise ConfigError(f"rollout={rollout} takes {rollout.tp} ranks per engine, which do not divide {world}.")
    engines = world // rollout.tp
    if rollout.dp not in (1, engines):
        raise ConfigError(f"rollout={rollout} takes {rollout.world} ranks, and there are {world}: leave dp out.")


def check_train(train: Layout, model: nn.Module, world: int) -> None:
    """That the model lies as the loop says.

    Raises:
        ConfigError: it does not; names both.
    """
    if train.pp > 1:
        raise ConfigError(f"train={train}: a model under FSDP or DDP has no pipeline stages. Leave pp out.")
    shards, wanted = shards_of(model), train.fsdp * train.tp
    if shards != wanted:
        lies = f"is sharded over {shards} ranks" if shards > 1 else "is whole on every rank"
        raise ConfigError(
            f"The model {lies}, train={train}. Shard it first (`accelerator.prepare`, `fully_shard`) and pass what "
            "comes back, or correct train=."
        )
    replicas = world // shards
    if train.dp not in (1, replicas):
        raise ConfigError(f"train={train} takes {train.world} ranks; the model has {replicas} replicas on {world}.")


def shards_of(model: nn.Module) -> int:
    """Over how many ranks the model's largest parameter is sharded; 1 for one that every rank has in full."""
    largest: Any = max(model.parameters(), key=lambda p: p.numel())
    if not hasattr(largest, "placements"):
        return 1
    sizes = zip(largest.placements, largest.device_mesh.shape, strict=True)
    return math.prod(int(size) for placement, size in sizes if not placement.is_replicate())
