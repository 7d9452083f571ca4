"""The hybrid engine, for training loops without a TRL trainer: an inference engine that samples from the model being
trained, and gives its device memory back for the training.

    engine = HybridEngine(model, tokenizer, optimizer, max_tokens=128, engine_options={"enable_sleep_mode": True})
    for prompts in batches:
        with engine.rollout_context():
            completions = engine.generate(prompts, num_generations=8)
        with engine.train_context():
            loss(model, completions).backward()
            optimizer.step()
            optimizer.zero_grad()

Inside `rollout_context`, calls of the model's own `generate` are answered by the engine, too. The hybrid engine works
in one process, under `torchrun` and under `accelerate launch`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .. import disk
from ..config import AUTO, HybridConfig, build
from ..contract.types import Completion, Layout, Phase, Sampling, SyncPlan, SyncReport
from ..errors import ComponentError, ConfigError, EngineError, HybridError, StaleWeightsError
from ..interprocess.ranks import Ranks
from ..memory.ledger import torch_optimizer
from ..plugins.hookspecs import hookimpl
from ..plugins.host import Host, check_ranks_agree
from ..plugins.registry import none_offered
from ..plugins.selection import TrainerArguments, select
from ..policy.policy import Policy
from ..session import Session
from .layouts import RolloutConfig, check_rollout, check_train, check_train_config, with_rollout
from .model_generate import served_generate

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Start = TypeVar("Start", bound=Callable[[SyncPlan], None] | Callable[[], None])
End = TypeVar("End", bound=Callable[[SyncReport], None] | Callable[[], None])


class HybridEngine:
    """An inference engine for your own training loop, which samples from the current weights of a model and gives its
    memory back for training. It is a context manager; `close` ends it.

    Args:
        model: the model that is trained: a transformers or PEFT model, which accelerate or DDP may have wrapped.
        tokenizer: its tokenizer or processor.
        optimizer: its optimizer, whose state is then offloaded during rollouts where the KV cache needs the memory; may
            be left out.
        config: components and their options; the engine is `vllm` by default.
        engine_options: options of the engine, instead of a `config` that sets nothing else.
        rollout: how each engine is split, e.g. `Layout(tp=4)`; there are as many engines as fit into the processes.
        train: how the model is sharded, e.g. `Layout(fsdp=8)`. Changes nothing: the model is only checked against it.
        rollout_config: instead of `rollout`, a mapping with the fields of `trlx_hybrid.own_loop.layouts.RolloutConfig`:
            `tp_size`, `pp_size` and `dp_type`.
        train_config: instead of `train`, a mapping of accelerate's settings:
            `{"fsdp_config": {"dp_shard_size": 8, …}}`.
        enable_reshard: True selects the weight sync that sends slices of parameters from the ranks that hold them in
            training to the ranks that need them in the engine (`HybridConfig(weights="reshard")`); False excludes it.
        compress_reshard: whether such a weight sync casts weights before it sends them. Weights are sent in the
            engine's dtype: True sets that to `compression_dtype`, False to the model's own.
        compression_dtype: the engine's dtype, in which weights are sent; smaller than the model's, or the same.
        sampling: the sampling parameters of this class's `generate`. Not needed where only the model's own `generate`
            is called, which has its own arguments.
        max_tokens: the longest completion, instead of `sampling` where its other defaults are right.
        accelerator: the accelerator of your loop; by default a new one.
        mixed_precision: "bf16" or "fp16" where the loop trains an fp32 model under autocast: the engine then computes
            in that dtype. By default it is read from the accelerator.
        seed: the seed of all sampling.
        plugins: objects with hook implementations, in addition to the installed plugins.

    Attributes:
        session: the live objects of the run (`trlx_hybrid.session.Session`), which hooks get, too.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: HybridConfig | None = None,
        engine_options: dict[str, Any] | None = None,
        rollout: Layout | None = None,
        train: Layout | None = None,
        rollout_config: Mapping[str, Any] | None = None,
        train_config: Mapping[str, Any] | None = None,
        enable_reshard: bool | None = None,
        compress_reshard: bool | None = None,
        compression_dtype: torch.dtype | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        accelerator: Accelerator | None = None,
        mixed_precision: str | None = None,
        seed: int = 0,
        plugins: Sequence[object] = (),
    ) -> None:
        from accelerate import Accelerator

        if sampling is not None and max_tokens is not None:
            raise ConfigError("HybridEngine takes either sampling=Sampling(...) or max_tokens=, not both.")
        for name, layout, mapping in (("rollout", rollout, rollout_config), ("train", train, train_config)):
            if layout is not None and mapping is not None:
                raise ConfigError(f"HybridEngine takes {name}= or {name}_config=, two spellings of the same: give one.")
            if mapping is not None and not isinstance(mapping, Mapping):
                got = type(mapping).__name__
                raise ConfigError(f"{name}_config= takes a mapping, got {got}; {name}= takes a Layout.")
        if config is not None and engine_options is not None:
            raise ConfigError("HybridEngine takes engine_options= only without config=; put them into the config.")
        config = config or HybridConfig(engine_options=engine_options)
        config = dataclasses.replace(config, engine=config.engine or "vllm")
        if config.scoring != AUTO:
            raise ConfigError("HybridEngine scores nothing, your loop does: leave HybridConfig.scoring out.")
        if config.environment is not None:
            raise ConfigError("HybridEngine plays nothing, your loop does: leave HybridConfig.environment out.")
        if config.router_replay:
            raise ConfigError("HybridEngine trains nothing, your loop does: leave HybridConfig.router_replay out.")
        if config.record is not None or config.replay is not None or config.rollout_only:
            raise ConfigError("HybridEngine trains nothing: leave record, replay and rollout_only out of HybridConfig.")
        split = build(RolloutConfig, rollout_config or {}, "rollout_config")
        rollout = rollout if rollout_config is None else split.layout
        if rollout is not None:
            config = with_rollout(config, rollout)
        policy = Policy(lambda: model, tokenizer, next(model.parameters()).device)
        host = Host.load(config.disable_plugins or (), plugins)
        resharding = [path.name for path in host.registry.components("weights") if path.reshards]
        config = with_reshard(config, resharding, enable_reshard, compress_reshard, compression_dtype, policy.dtype)
        arguments = TrainerArguments(engine_options={}, unscored="your loop scores")
        selection = select(config, arguments, host.registry)
        if enable_reshard is False:
            paths = [path for path in selection.paths if not path.component.reshards]
            selection = dataclasses.replace(selection, paths=paths)
        if selection.stock:
            raise ConfigError("HybridEngine needs an engine other than 'transformers': HybridConfig(engine='vllm').")
        accelerator = accelerator or Accelerator(cpu=next(model.parameters()).device.type == "cpu")
        if accelerator.distributed_type.value == "DEEPSPEED":
            raise ConfigError(
                "HybridEngine does not read DeepSpeed's parameters. Train with GRPOTrainer, or use FSDP2."
            )
        ranks = Ranks(accelerator)
        if rollout is not None:
            check_rollout(rollout, ranks.world, alone=split.dp_type == "none")
        if train is not None:
            check_train(train, model, ranks.world)
        if train_config is not None:
            check_train_config(train_config, model, ranks.world)
        check_ranks_agree(ranks.gather(host.plugins))
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)
        policy.fsdp_version = fsdp and fsdp.fsdp_version
        self._model, self._steps, self._closed = model, 0, False
        self.session = Session(
            host,
            config,
            selection,
            args=_arguments(optimizer, mixed_precision or accelerator.mixed_precision, seed),
            sampling=sampling or Sampling(max_tokens=max_tokens or 0, logprobs=0),
            policy=policy,
            ranks=ranks,
            step=lambda: self._steps,
            optimizer=lambda: torch_optimizer(optimizer),
        )

    @contextmanager
    def rollout_context(self, training: bool = True) -> Iterator[None]:
        """Give the device memory to the engine inside the context, after syncing the model's current weights to it;
        collective.

        Inside, `generate` may be called. Calls of `model.generate` are answered by the engine, too, with the arguments
        and results of transformers' `generate`; see `trlx_hybrid.own_loop.model_generate.generate`.

        Args:
            training: False for evaluation, which shares no random draws with training.

        Raises:
            StaleWeightsError: the call is inside another `rollout_context`.
            EngineError: after `close`.
        """
        if self._closed:
            raise EngineError("This HybridEngine was closed, and its memory is free: make a new one.")
        with self.session.rollout_phase(training), served_generate(self.session, self._model):
            yield

    def generate(self, prompts: Sequence[list[int]], num_generations: int = 1) -> list[Completion]:
        """Sample `num_generations` completions per prompt, and return all completions in one list. The completions of a
        prompt stand next to each other, in the order of the prompts. Call it inside `rollout_context`.

        Args:
            prompts: token ids of each prompt of this rank.

        Raises:
            StaleWeightsError: the call is outside of a rollout, or the weights changed within it.
            EngineError: a prompt leaves no room for a completion in the engine's context.
            ConfigError: no maximal length of completions was set.
        """
        if self.session.sampling.max_tokens < 1:
            raise ConfigError(
                "HybridEngine was made without max_tokens= and sampling=, and its generate() needs one of them. The "
                "model's own, model.generate(input_ids=..., max_new_tokens=...), takes the length with each call."
            )
        if self.session.phase is not Phase.ROLLOUT:
            raise StaleWeightsError("generate() outside of rollout_context(), in which the engine is awake and synced.")
        repeated = [prompt for prompt in prompts for _ in range(num_generations)]
        return self.session.generate(repeated, num_generations=num_generations)

    @contextmanager
    def train_context(self) -> Iterator[None]:
        """Mark an optimizer step: inside the context the device memory belongs to the training. On exit the step is
        counted, and the next rollout will sync the weights to the engine."""
        if self.session.phase is not Phase.TRAIN:
            raise StaleWeightsError("train_context() inside rollout_context(): leave the rollout before training.")
        try:
            yield
        finally:
            self._steps += 1
            self.session.versions.changed()

    def on_reshard_start(self, function: Start) -> Start:
        """Register `function(plan)`, or `function()` if it takes no argument, to be called before each weight sync,
        whichever kind of weight sync it is. Returns the function, so that it can be used as a decorator."""
        self._listen("trlx_sync_start", lambda plan: _called(function, "on_reshard_start", plan))
        return function

    def on_reshard_end(self, function: End) -> End:
        """Register `function(report)`, or `function()` if it takes no argument, to be called after each weight sync,
        when the engine holds the model's weights. Returns the function, so that it can be used as a decorator."""
        self._listen("trlx_sync_end", lambda report: _called(function, "on_reshard_end", report))
        return function

    def _listen(self, hook: str, function: Callable[..., None]) -> None:
        host = self.session.host
        listener = SimpleNamespace(**{hook: hookimpl(function, trylast=True)})  # in the order of their registration
        host.register(listener, f"reshard-listener-{len(host.plugins)}")

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the model's own state dict, every tensor in its own memory: safe to keep while training goes
        on.

        Raises:
            StaleWeightsError: the call is inside `rollout_context`, where the model may be offloaded.
        """
        if self.session.phase is not Phase.TRAIN:
            raise StaleWeightsError("state_dict() inside rollout_context(): leave the rollout before saving.")
        return {name: t.detach().clone() for name, t in self.session.policy.module.state_dict().items()}

    def save_state(self, folder: str | Path) -> None:
        """Write to a folder, on rank 0, the state that a resumed run needs to sample as if it had not been interrupted.
        Model and optimizer are not part of it: `accelerator.save_state` writes them.

        Collective, as `accelerator.save_state` is: when it returns, the state is written.

        Raises:
            HybridError: raised on every rank if the state cannot be written; the folder's earlier files stay.
        """
        self.session.ranks.by_first(functools.partial(self._save_state, Path(folder)))

    def _save_state(self, folder: Path) -> None:
        def text(error: Exception) -> str:
            told = disk.told(error, folder)
            return f"HybridEngine.save_state cannot write to {folder}: {told} Make room there, or name another folder."

        with disk.named(text):
            folder.mkdir(parents=True, exist_ok=True)
            self.session.save_state(folder)

    def load_state(self, folder: str | Path) -> None:
        """Restore the state that `save_state` wrote to a folder. Call it on every rank, after the model was loaded."""
        self._steps = self.session.load_state(Path(folder), self._steps)

    def close(self) -> None:
        """Free the engine; the model keeps its weights. May be called twice.

        Raises:
            StaleWeightsError: the call is inside `rollout_context`.
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
    """Return an object with the trainer arguments that components read (seed, precision, optimizer), for a loop without
    a trainer.

    Args:
        precision: "bf16" or "fp16" for autocast, anything else for none.
    """
    arguments = SimpleNamespace(seed=seed, bf16=precision == "bf16", fp16=precision == "fp16", optim="sgd")
    if optimizer is not None:
        inner = torch_optimizer(optimizer)
        name = type(inner).__name__.lower()
        arguments.optim = {"adam": "adamw_torch", "adamw": "adamw_torch", "adamw8bit": "adamw_8bit"}.get(name, name)
        arguments.learning_rate = max(group["lr"] for group in inner.param_groups)
    return arguments


def _called(function: Callable[..., None], moment: str, what: SyncPlan | SyncReport) -> None:
    try:
        function(*([what] if _takes_argument(function) else []))
    except Exception as error:  # the loop's own function, not a plugin's
        name = getattr(function, "__qualname__", function)
        raise HybridError(f"{name}, called {moment}, raised {type(error).__name__}: {error}") from error


def _takes_argument(function: Callable[..., None]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def with_reshard(
    config: HybridConfig,
    resharding: Sequence[str],
    enable: bool | None,
    compress: bool | None,
    dtype: torch.dtype | None,
    own: torch.dtype,
) -> HybridConfig:
    """Return the config with `weights` and the engine's `dtype` set as the arguments of `HybridEngine` about resharding
    say. Resharding sends weights in the engine's dtype.

    Args:
        resharding: names of the weight syncs that move slices between the trainer's and the engine's layout of
            parameters (`reshards=True`). If `enable` is True, the first of them is selected.
        enable, compress, dtype: `enable_reshard`, `compress_reshard` and `compression_dtype` of `HybridEngine`.
        own: the model's dtype.

    Raises:
        ComponentError: `enable` is True, and no plugin offers such a weight sync.
        ConfigError: these arguments contradict the config, or each other.
    """
    if enable and not resharding:
        raise ComponentError(f"enable_reshard=True needs a weight path that reshards: {none_offered('weights')}.")
    if enable is not None and config.weights != "auto" and enable != (config.weights in resharding):
        raise ConfigError(f"enable_reshard={enable} contradicts HybridConfig.weights={config.weights!r}. Give one.")
    if enable:
        config = dataclasses.replace(config, weights=resharding[0])
    if compress is None and dtype is None:
        return config
    if config.weights not in resharding:
        raise ConfigError("compress_reshard and compression_dtype say what a reshard sends: add enable_reshard=True.")
    if bool(compress) != (dtype is not None):
        raise ConfigError(
            "compress_reshard=True and compression_dtype= belong together: the dtype of the engine, which weights are "
            "cast to before they are sent, e.g. torch.bfloat16."
        )
    sent = own if dtype is None else dtype
    if sent != own and sent.itemsize >= own.itemsize:
        raise ConfigError(f"compression_dtype={sent} compresses nothing: the model is in {own}. Leave it out.")
    name, options = str(sent).removeprefix("torch."), config.options("engine")
    given = options.get("dtype") or "auto"
    if str(given).removeprefix("torch.") not in ("auto", name):
        raise ConfigError(
            f"compress_reshard={compress} sends {sent}, which the engine then computes in, and its options say "
            f"dtype={given!r}. Give one."
        )
    return dataclasses.replace(config, engine_options=options | {"dtype": name})
