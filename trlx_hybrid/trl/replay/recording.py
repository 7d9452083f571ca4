"""Recordings: folders with every batch that a run trained on or evaluated, from which another run can train without
sampling. Tensors are in safetensors, the rest is JSON.

    recording.json                      what ran: versions, ranks, model, tokenizer, settings, device
    rank0/train-000012-0.safetensors    rank 0's rows of the batch that begins with micro-batch 0 of step 12
    rank0/eval-000010-3.safetensors     its rows of batch 3 of the evaluation after 10 steps

A file gets its name only once it is complete, so a run that is killed leaves complete files. Each file contains a
digest of its tensors and the number of batches before it, so that a damaged or missing file is detected.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import ConfigError, HybridError, listed
from ...interprocess import plain_data
from ...plugins.selection import PADDED, described
from ...versions import package_version
from ..generation.truncation_rule import BY_TOKEN, MASKS, rule_of
from ..scoring.kept_ids import FACT
from ..scoring.shape import UNMEASURED, switched_off

if TYPE_CHECKING:
    from ..stock import StockTrainer

FILE = "recording.json"
FORMAT = 1
NAME = re.compile(r"(train|eval)-(\d+)-(\d+)\.safetensors")

FOREIGN = re.compile(
    r"format|trainer|ranks|model\..*|adapters|tokenizer\..*|versions\.trl|settings\.("
    r"per_device_train_batch_size|gradient_accumulation_steps|steps_per_generation|num_iterations|num_generations|"
    r"temperature|top_[pk]|min_p|repetition_penalty|generation_kwargs|max_completion_length|pad_to_multiple_of|beta|"
    r"mask_truncated_completions|scale_rewards|reward_weights|multi_objective_aggregation|vllm_importance_.*)"
)
"""A pattern of the names of those facts that must be equal in a recording and the run that replays it, such as the
model, and the settings that decided what the batches contain. A fact is an entry of `recording.json`."""

EVALUATION = re.compile(r"settings\.(eval_(strategy|steps|delay|on_start)|(per_device|num_generations)_eval.*)")
"""A pattern of the names of further facts that must be equal in a replay, if the run evaluates."""

QUIET = re.compile(r"output_dir|run_name|log|report_to|save|push|hub|vllm|tqdm|dataloader|resume|eval|project|trackio")
"""A pattern of the names of those facts that change no number of a training step, so that differences are not
reported."""

TRUNCATED = "truncated completions"
"""The key, in a recording's facts (`recording.json`), of the rule by which completions count as truncated; present only
where the run masks truncated completions."""

NO_FACTS = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "base_model_name_or_path", "peft_version"),
    "architectures",  # saving a model adds it; the model's class is a separate fact
)
"""Fields of the configs of a model and its adapters that are no facts of the recording: they differ with the place on
disk or the library version."""


@dataclass(kw_only=True, slots=True, eq=False)
class RecordedBatch:
    """One rank's rows of a rollout, as TRL trains on them, and everything else that training takes from the rollout.

    Attributes:
        mode: "train" or "eval".
        step: optimizer steps done when the rollout was sampled.
        number: the micro-batch of the step with which the batch begins; in an evaluation, the number of the batch.
        index: how many training batches were recorded before this one.
        weight_version: version of the weights that sampled the rollout.
        weights: whether this rank held shards of the weights, and digests of its trainable and of its frozen weights.
        tokens_seen: TRL's `num_input_tokens_seen` after the rollout.
        metrics: what the rollout added to TRL's log, by name: whether it replaced the earlier values, and the new
            values.
        values: what TRL's `_generate_and_score_completions` returned: tensors and plain data by name, in TRL's order.
        rewards: (world * B, functions) float, of all ranks; NaN where a function returned None. None without rewards.
        generators: states of torch's generators after the rollout, (n,) uint8, by type of device.
        threads: number of torch's threads if the run trains on a CPU, where rounding of sums depends on it; else 0.
            vLLM reduces the number.
    """

    mode: str
    step: int
    number: int
    index: int
    weight_version: int
    weights: list[Any]
    tokens_seen: int
    metrics: dict[str, list[Any]]
    values: dict[str, Any]
    rewards: Tensor | None
    generators: dict[str, Tensor]
    threads: int = 0


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Return a context for writing one file of a recording; an error inside names the file.

    Raises:
        HybridError: the file cannot be written. A recording with gaps is useless, so the run stops.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise HybridError(
            f"HybridConfig.record cannot write {path}: {error}. What was recorded before stays. Make room or choose "
            "another folder, and resume from a checkpoint, or leave record out."
        ) from error


class Recording:
    """One rank's part of a recording's folder, which can be written to and read from.

    Args:
        folder: the recording's folder; on several nodes, one that all of them share.
        rank: the rank.

    Attributes:
        places: the optimizer step and micro-batch with which each training batch begins, in order; filled by `inspect`.
    """

    def __init__(self, folder: str | Path, rank: int = 0) -> None:
        self.folder, self.rank = Path(folder), rank
        self.places: list[tuple[int, int]] = []  # (step, number) of each training batch, after `inspect`
        self._written = 0

    @functools.cached_property
    def facts(self) -> dict[str, Any] | None:
        """The facts of the recorded run (versions, model, settings and so on), read from `recording.json`; None where
        nothing was recorded.

        Raises:
            ConfigError: `recording.json` cannot be read, or has another format.
        """
        path = self.folder / FILE
        try:
            found = json.loads(path.read_text())
            if found["format"] != FORMAT:
                raise ConfigError(f"{path} is of format {found['format']}, and this version reads {FORMAT}.")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read: {error!r}. Record anew.") from error
        return dict(found)

    def begin(self, facts: Mapping[str, Any], step: int) -> None:
        """Prepare the folder for batches from optimizer step `step` on. If the run was resumed, remove the batches that
        it had recorded from there on before.

        Args:
            facts: the facts of the run, such as versions, model and settings, as JSON data; written to
                `recording.json`.
        """
        with writing(self._here):
            self._here.mkdir(parents=True, exist_ok=True)
        self._written = 0
        for (mode, at, _), path in self._files().items():
            if at > step or (at == step and mode == "train"):
                path.unlink()
            else:
                self._written += mode == "train"
        if self.rank == 0:
            part = self.folder / f"{FILE}.part"
            with writing(part):
                part.write_text(json.dumps(facts, indent=1))
                part.replace(self.folder / FILE)
        self.__dict__.pop("facts", None)  # the cached facts, which were None

    def write(self, batch: RecordedBatch) -> None:
        """Write one batch, after setting its `index` to the number of training batches recorded before it.

        Raises:
            ConfigError: the batch holds something else than tensors and plain data.
            HybridError: the file cannot be written, for example on a full disk.
        """
        batch.index = self._written
        tensors = {f"batch.{name}": value for name, value in batch.values.items() if isinstance(value, Tensor)}
        tensors |= {f"generator.{name}": state for name, state in batch.generators.items()}
        if batch.rewards is not None:
            tensors["rewards"] = batch.rewards
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        about = {f.name: getattr(batch, f.name) for f in dataclasses.fields(RecordedBatch)}
        about |= {"rewards": None, "generators": None, "digest": digest(tensors), "order": list(batch.values)}
        about["values"] = {name: v for name, v in batch.values.items() if not isinstance(v, Tensor)}
        try:
            text = plain_data.dumps(about).decode()
        except plain_data.NotPlainError as error:
            raise ConfigError(f"HybridConfig.record cannot keep this batch: it is {error}.") from error
        path = self._path(batch.mode, batch.step, batch.number)
        part = path.with_name(f"{path.name}.part")
        with writing(path):
            save_file(tensors, part, metadata={"batch": text})
            part.replace(path)
        self._written += batch.mode == "train"

    def inspect(self) -> str | None:
        """Read all batches once, to check them and to fill `places`. Return what is wrong with the first damaged or
        missing one, or None."""
        self.places = []
        for mode, *place in sorted(self._files()):
            try:
                batch = self.read(mode, *place)
            except ConfigError as error:
                return str(error)
            if mode == "train" and batch.index != len(self.places):
                return f"{self._path(mode, *place)} was batch {batch.index}, not {len(self.places)}. {WAY_OUT}"
            if mode == "train":
                self.places.append((batch.step, batch.number))
        return None if self.places else f"{self._here} holds no batch of a training step."

    def latest(self, step: int, micro_batch: int) -> tuple[int, int]:
        """Return the recorded batch that a micro-batch of the run belongs to, as the (step, micro-batch) with which the
        batch begins.

        Args:
            step: the optimizer step of the micro-batch.
            micro_batch: its number in the step.

        Raises:
            ConfigError: the recording begins later.
        """
        earlier = [place for place in self.places if place <= (step, micro_batch)]
        if not earlier:
            raise ConfigError(
                f"The recording in {self.folder} begins with step {self.places[0][0]}, and this run is at {step}. "
                "Resume it from the checkpoint that the recorded run went on from."
            )
        return earlier[-1]

    def read(self, mode: str, step: int, number: int) -> RecordedBatch:
        """Read one batch from its file, and return it on the CPU.

        Args:
            mode: "train" or "eval".
            step: optimizer steps done when the batch was sampled.
            number: the micro-batch of the step with which the batch begins; in an evaluation, the number of the batch.

        Raises:
            ConfigError: the batch is missing, or differs from what was written.
        """
        path = self._path(mode, step, number)
        try:
            with safe_open(path, "pt") as file:
                about = plain_data.loads(file.metadata()["batch"].encode())
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
        except FileNotFoundError as error:
            raise ConfigError(f"The recording has no {path}: what asks for it was not in the recorded run.") from error
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is torn: {error}. {WAY_OUT}") from error
        if about.pop("digest") != digest(tensors):
            raise ConfigError(f"{path} is damaged: its tensors are not those that were written. {WAY_OUT}")
        values = {name: tensors.get(f"batch.{name}", about["values"].get(name)) for name in about.pop("order")}
        states = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith("generator.")}
        return RecordedBatch(**about | {"values": values, "generators": states, "rewards": tensors.get("rewards")})

    @property
    def _here(self) -> Path:
        return self.folder / f"rank{self.rank}"

    def _path(self, mode: str, step: int, number: int) -> Path:
        return self._here / f"{mode}-{step:06d}-{number}.safetensors"

    def _files(self) -> dict[tuple[str, int, int], Path]:
        found = ((NAME.fullmatch(path.name), path) for path in self._here.glob("*"))
        return {(match[1], int(match[2]), int(match[3])): path for match, path in found if match}


WAY_OUT = "Record anew, or remove it and what comes after it, on all ranks, to replay what comes before."


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 of the names, dtypes, shapes and bits of tensors, which must be contiguous and on the CPU."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def facts_of(trainer: StockTrainer, replayed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the facts of a run that its recording stores, as JSON data: versions, model, tokenizer, ranks, device and
    settings. A replay compares them with its own.

    Args:
        replayed: the facts of the recording that the run replays; None where it samples.
    """
    session = trainer.session
    policy, config, scoring = session.policy, session.config, described(session.selection.scoring)
    tokenizer = getattr(policy.processing_class, "tokenizer", policy.processing_class)
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    adapters = getattr(policy.module, "peft_config", {})
    facts = {
        "format": FORMAT,
        "versions": {name: version(name) for name in ("trl", "transformers", "peft", "torch")}
        | {"trlx_hybrid": package_version()},
        "trainer": trainer._base_name,
        "ranks": session.ranks.world,
        "device": policy.device.type,
        "sampler": bool(trainer.use_vllm),
        "model": _facts(json.loads(policy.base.config.to_json_string(use_diff=False)))
        | {"class": type(policy.base).__name__, "parameters in": str(policy.dtype)},
        "adapters": json.dumps({name: _facts(a.to_dict()) for name, a in adapters.items()}, default=_plain),
        "tokenizer": {
            "tokens": len(tokenizer),
            "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        "settings": json.loads(trainer.args.to_json_string()),
        "algorithm": config.algorithm,
        "algorithm_options": config.options("algorithm"),
        "router_replay": config.router_replay,
        "scoring": scoring["name"],
        "scoring_options": scoring["options"],
    }
    if session.over_support and (setting := session.sampling.truncated_by()) is not None:
        facts[FACT] = setting
    if switched_off(session.config.max_logprob_gap, replayed):
        facts[UNMEASURED] = True
    if getattr(trainer.args, MASKS, False):
        facts[TRUNCATED] = rule_of(trainer)
    return dict(json.loads(json.dumps(facts, default=_plain)))


def scored_by(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scoring of a recorded run, as `described` returns it; None where TRL scored, and for recordings that
    do not hold all options.

    Args:
        facts: the facts of the recording.
    """
    name = facts.get("scoring")
    return None if name is None else {"name": name, "options": facts.get("scoring_options", {})}


def compared(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare the facts of a recording (versions, model, settings and so on) with those of the run that replays it.

    Returns:
        Texts for the facts that differ, in two lists: those that make the recording unusable for this run, and those
        with which the same batches may train differently.
    """
    then, now = dict(_flat(recorded)), dict(_flat(here))
    if TRUNCATED in now:
        then.setdefault(TRUNCATED, BY_TOKEN)  # recordings of earlier versions lack this fact
    then["scoring"] = then.get("scoring") or PADDED
    evaluates = now["settings.eval_strategy"] != "no"
    foreign, other = [], []
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) == now.get(name) or (name.startswith("model.") and not (name in then and name in now)):
            continue  # a config field that only one of the two transformers versions has
        if name.startswith("scoring_options.") and name not in then:
            continue  # earlier recordings hold the options that the user set; this run has taken over the others
        text = f"{name.removeprefix('settings.')} is {now.get(name)!r:.60}, and {then.get(name)!r:.60} was recorded"
        if FOREIGN.fullmatch(name) or (evaluates and EVALUATION.fullmatch(name)):
            foreign.append(text)
        elif not QUIET.search(name):
            other.append(text)
    return foreign, other


def refuse_foreign(folder: Path, foreign: list[str]) -> None:
    """Raise a ConfigError if a recording cannot be used for this run.

    Args:
        folder: the recording's folder.
        foreign: texts for the facts that differ and make it unusable; empty where there are none.
    """
    if foreign:
        raise ConfigError(
            f"The recording in {folder} is not of this run: {listed(foreign, 8)}. Replay it with the model, the "
            "tokenizer and the settings that it was made with, or record anew."
        )


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in NO_FACTS}


def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
