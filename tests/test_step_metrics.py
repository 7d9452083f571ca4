"""What a step took and computed, in TRL's logs and on the progress bar."""

import re
import time

import pytest
import trl
import trlx_hybrid
from peft import LoraConfig
from transformers import TrainerCallback
from trlx_hybrid.testing.models import tiny_model
from trlx_hybrid.trl.generation.resampling import _together
from trlx_hybrid.trl.metrics import step_metrics
from trlx_hybrid.trl.metrics.flops import model_flops
from trlx_hybrid.trl.scoring import agreement

GRPO = trlx_hybrid.GRPOTrainer
METERED = {"scoring": "padded"}  # TRL's own way of everything, and the metrics
STEP = "hybrid/step/"
PARTS = ("rollout", "scoring", "loss", "optimizer")
NAMES = {f"{STEP}{part}_seconds" for part in PARTS} | {f"{STEP}tokens", f"{STEP}padded_tokens"}


class Ragged:
    """A rollout of the user's whose completions differ in length; remembers the rows of each batch that it trained."""

    def __init__(self):
        self.rows = []

    def __call__(self, prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        lengths = [1 + (5 * i + 3 * len(self.rows)) % 11 for i in range(len(prompts))]
        if trainer.model.training:
            self.rows.append([(len(ids), length) for ids, length in zip(prompt_ids, lengths, strict=True)])
        completions = [[10 + (7 * i + k) % 80 for k in range(length)] for i, length in enumerate(lengths)]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    @property
    def tokens(self):
        return [sum(prompt + completion for prompt, completion in batch) for batch in self.rows]

    @property
    def padded(self):
        return [len(b) * (max(p for p, _ in b) + max(c for _, c in b)) for b in self.rows]


def lora():
    return LoraConfig(r=4, target_modules="all-linear")


def train_logs(finished):
    return [log for log in finished.trainer.state.log_history if "loss" in log]


def values(logs, name):
    return [log[STEP + name] for log in logs]


def names(log):
    return {name for name in log if name.startswith(STEP)}


def test_parts_add_up_and_tokens_are_those_of_the_rows(run):
    rollout = Ragged()
    given = {"peft_config": lora(), "beta": 0.1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    logs = train_logs(run(GRPO, hybrid=METERED, rollout_func=rollout, **given))
    assert [names(log) for log in logs] == [NAMES] * 3
    for log in logs:
        seconds = {part: log[f"{STEP}{part}_seconds"] for part in PARTS}
        assert all(took > 0 for took in seconds.values())
        assert seconds["rollout"] + seconds["scoring"] + seconds["loss"] <= log["step_time"]
    assert values(logs, "tokens") == rollout.tokens
    assert values(logs, "padded_tokens") == rollout.padded


def test_an_engine_is_timed_from_before_its_edges_to_after_them(run):
    finished = run(GRPO, use_vllm=True)
    for log in train_logs(finished):
        assert names(log) == NAMES
        assert log["hybrid/rollout_seconds"] <= log[f"{STEP}rollout_seconds"]
        assert sum(log[f"{STEP}{part}_seconds"] for part in ("rollout", "scoring", "loss")) <= log["step_time"]
    prompts = [len(prompt) for prompt in finished.recorder.prompts]
    lengths = [p + len(ids) for p, ids in zip(prompts, finished.recorder.completions, strict=True)]
    assert values(train_logs(finished), "tokens") == [sum(lengths[i : i + 8]) for i in range(0, 24, 8)]


def test_a_row_that_is_scored_alone_is_in_the_steps_time_as_in_the_losss(run, monkeypatch):
    scored = agreement._scored_alone
    monkeypatch.setattr(agreement, "_scored_alone", lambda *given: [scored(*given), time.sleep(1)][0])
    log = train_logs(run(GRPO, use_vllm=True, max_steps=1))[0]
    assert 1 < log[f"{STEP}loss_seconds"] < log["step_time"]


def test_a_step_that_samples_nothing_has_no_seconds_of_it(run):
    rollout = Ragged()
    given = {"peft_config": lora(), "beta": 0.1, "num_iterations": 2, "max_steps": 4}
    logs = train_logs(run(GRPO, hybrid=METERED, rollout_func=rollout, **given))
    for part in ("rollout", "scoring"):
        assert [took > 0 for took in values(logs, f"{part}_seconds")] == [True, False] * 2
    assert all(took > 0 for took in values(logs, "loss_seconds"))
    assert values(logs, "tokens") == [tokens for tokens in rollout.tokens for _ in range(2)]
    assert values(logs, "padded_tokens") == [tokens for tokens in rollout.padded for _ in range(2)]


@pytest.mark.parametrize(("rollouts", "steps"), [(2, 1), (1, 2)], ids=["two rollouts a step", "two steps a rollout"])
def test_rollouts_and_steps_need_not_be_one_to_one(run, rollouts, steps):
    rollout = Ragged()
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    logs = train_logs(
        run(GRPO, hybrid=METERED, rollout_func=rollout, steps_per_generation=2 * steps // rollouts, **given)
    )
    assert len(rollout.rows) == 2 * rollouts // steps
    assert sum(values(logs, "tokens")) == sum(rollout.tokens)
    assert sum(values(logs, "padded_tokens")) == sum(rollout.padded)
    assert [took > 0 for took in values(logs, "rollout_seconds")] == [True, steps == 1]


def test_a_line_of_the_log_is_the_mean_of_its_steps_and_evaluations_are_not_in_it(run, prompts):
    rollout = Ragged()
    given = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 4}
    given |= {"logging_steps": 2, "max_steps": 4, "eval_dataset": prompts.select(range(4))}
    finished = run(GRPO, hybrid=METERED, rollout_func=rollout, **given)
    first, second = train_logs(finished)
    assert len(rollout.rows) == 4
    assert values([first, second], "tokens") == [sum(rollout.tokens[:2]) / 2, sum(rollout.tokens[2:]) / 2]
    assert sum(first[f"{STEP}{part}_seconds"] for part in ("rollout", "loss")) <= first["step_time"]
    evaluations = [log for log in finished.trainer.state.log_history if "eval_loss" in log]
    assert len(evaluations) == 5
    assert not any(STEP in name for log in evaluations for name in log)


def test_a_resumed_run_counts_its_own_steps(run):
    rollout = Ragged()
    given = {"hybrid": METERED, "rollout_func": rollout, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    first = run(GRPO, max_steps=2, **given)
    checkpoint = f"{first.trainer.args.output_dir}/checkpoint-1"  # in the middle of a rollout's iterations
    logs = train_logs(run(GRPO, max_steps=3, resume=checkpoint, **given))[1:]  # the first came with the checkpoint
    assert len(rollout.rows) == 2
    assert values(logs, "tokens") == rollout.tokens
    assert [took > 0 for took in values(logs, "rollout_seconds")] == [False, True]


def test_a_step_that_an_error_ended_is_in_no_number(run):
    """The first of its two micro-batches was whole."""
    rollout, calls = Ragged(), []

    def reward(completions, **_):
        calls.append(None)
        if len(calls) == 4:
            raise RuntimeError("broken")
        return [float(len(text)) for text in completions]

    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    finished = run(GRPO, hybrid=METERED, rollout_func=rollout, reward_funcs=reward, max_steps=2, train=False, **given)
    trainer = finished.trainer
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    rollout.rows.clear()
    trainer.train()
    tokens = [sum(rollout.tokens[:2]), sum(rollout.tokens[2:])]
    assert values(train_logs(finished), "tokens") == tokens


def test_a_device_that_lags_behind_is_waited_for_where_the_log_is_written(run, monkeypatch):
    """As a GPU may."""
    monkeypatch.setattr(step_metrics.Clock, "reached", lambda self, moment, wait=False: wait)
    rollout = Ragged()
    logs = train_logs(run(GRPO, hybrid=METERED, rollout_func=rollout, logging_steps=2, max_steps=4))
    assert values(logs, "tokens") == [sum(rollout.tokens[:2]) / 2, sum(rollout.tokens[2:]) / 2]


@pytest.mark.parametrize("trainer", ["RLOO", "Distillation"])
def test_other_trainers_log_what_is_known_of_them(run, monkeypatch, trainer):
    """Distillation's loss goes through two models: what they compute is not counted."""
    monkeypatch.setattr(step_metrics, "peak", lambda policy, args: 1e12)
    distils = trainer == "Distillation"
    given = {"teacher_model": tiny_model(seed=1)} if distils else {"beta": 0.0}
    given |= {"config_class": getattr(trl, f"{trainer}Config"), "max_steps": 1, "use_vllm": True}
    (log,) = train_logs(run(getattr(trlx_hybrid, f"{trainer}Trainer"), **given))
    mfu, unknown = {f"{STEP}mfu"}, {f"{STEP}padded_tokens"}
    assert names(log) == (NAMES - unknown if distils else NAMES | mfu)
    assert log[f"{STEP}tokens"] > 0


def test_mfu_is_what_real_tokens_need_over_the_seconds_of_training(run, monkeypatch):
    """On a CPU, whose peak nobody states, it takes one from here."""
    rollout = Ragged()
    given = {"hybrid": METERED, "rollout_func": rollout, "max_steps": 2}
    assert not any(f"{STEP}mfu" in log for log in train_logs(run(GRPO, **given)))
    rollout.rows.clear()
    monkeypatch.setattr(step_metrics, "peak", lambda policy, args: 2e12)
    finished = run(GRPO, **given)
    flops = model_flops(finished.trainer.session.policy)
    for log, rows in zip(train_logs(finished), rollout.rows, strict=True):
        needed = sum(flops.token * (p + c) + flops.scored * c + flops.pair * (p + c) * (p + c + 1) / 2 for p, c in rows)
        seconds = log[f"{STEP}loss_seconds"] + log[f"{STEP}scoring_seconds"]
        assert log[f"{STEP}mfu"] == pytest.approx(needed / seconds / 2e12)


# --- the progress bar -----------------------------------------------------------------------------------------------


class Watching(TrainerCallback):
    """Keeps what the bar says when each step has ended."""

    def __init__(self):
        self.bars = []

    def on_step_end(self, *args, **kwargs):
        self.bars.append(str(self.bar()))


def watched(run, **given):
    finished, watching = run(GRPO, train=False, disable_tqdm=False, **given), Watching()
    handler = finished.trainer.callback_handler
    (progress,) = [c for c in handler.callbacks if isinstance(c, step_metrics.ProgressCallback)]
    watching.bar = lambda: progress.training_bar
    finished.trainer.add_callback(watching)
    finished.trainer.train()
    return finished, watching.bars


def test_the_bar_ends_with_one_line_of_the_step(run, capsys):
    rollout = Ragged()
    finished, bars = watched(run, hybrid=METERED, rollout_func=rollout)
    assert len(bars) == 3
    for number, (bar, log) in enumerate(zip(bars, train_logs(finished), strict=True), 1):
        (tokens, padded, loss) = (log[STEP + name] for name in ("tokens", "padded_tokens", "loss_seconds"))
        ending = rf"\| {number}/3 \[.*, (rollout \d+\.\d\ds, )?loss {loss:.2f}s(, optimizer \d+\.\d\ds)?, "
        assert re.search(ending + rf"{tokens:.0f} tokens padded to {padded:.0f}\]$", bar)
    assert bars[-1].rpartition(", loss ")[2] in capsys.readouterr().err  # also where nothing is redrawn


def test_an_engines_sync_is_in_it_and_an_mfu_that_is_known():
    found = {"rollout_seconds": 2.0, "scoring_seconds": 0.0, "loss_seconds": 1.234, "optimizer_seconds": 0.1}
    said = step_metrics.line(found | {"tokens": 900.0, "padded_tokens": 900.0, "mfu": 0.412}, sync=0.05)
    assert said == "rollout 2.00s (sync 0.05s), loss 1.23s, optimizer 0.10s, 900 tokens, MFU 41%"


def test_a_rollout_in_two_parts_has_one_sync(run):
    trainer = run(GRPO, hybrid=METERED, train=False).trainer
    steps, session = trainer._run.step_metrics, trainer.session
    steps.on_step_begin()
    with steps.micro_batch():
        for seconds, wanted in ((2.0, 2.0), (1.0, 3.0)):
            session.metrics = {"hybrid/sync_seconds": seconds}
            for _ in range(2):  # sampled, and handed to TRL
                with steps.part("rollout"):
                    pass
            assert steps._step.sync == wanted


def test_rows_in_flight_are_in_it():
    found = {"rollout_seconds": 2.0, "scoring_seconds": 0.0, "loss_seconds": 1.0, "optimizer_seconds": 0.1}
    rollout = {"hybrid/staleness/mean": 0.44, "hybrid/staleness/max": 2.0, "hybrid/in_flight/rows": 12.0}
    said = step_metrics.line(found, 0.0, rollout)
    assert said.endswith("optimizer 0.10s, staleness 0.4 (max 2), 12 rows in flight")


def test_a_bar_of_the_users_own_stays_as_it_is(run):
    class Own(step_metrics.ProgressCallback):
        def on_step_begin(self, *args, **kwargs):
            self.training_bar.set_postfix_str("mine", refresh=False)

    finished = run(GRPO, hybrid=METERED, max_steps=1, train=False, disable_tqdm=False)
    finished.trainer.remove_callback(step_metrics.ProgressCallback)
    own, watching = Own(), Watching()
    watching.bar = lambda: own.training_bar
    for callback in (own, watching):
        finished.trainer.add_callback(callback)
    finished.trainer.train()
    assert watching.bars[0].endswith(", mine]")


def test_where_bars_are_disabled_there_is_no_line(run, capsys):
    run(GRPO, hybrid=METERED, max_steps=1)
    said = capsys.readouterr()
    assert "tokens padded to" not in said.err + said.out


def test_stock_trl_has_neither_metrics_nor_a_line(run):
    finished, bars = watched(run, max_steps=2)
    assert not any(name.startswith("hybrid/") for log in finished.trainer.state.log_history for name in log)
    assert not any("loss" in bar or "tokens" in bar for bar in bars)
    assert not any(isinstance(c, step_metrics.StepMetrics) for c in finished.trainer.callback_handler.callbacks)


@pytest.mark.parametrize(
    ("rounds", "together"),
    [
        ([[1.0, 2.0], 3.0], [1.0, 2.0, 3.0]),
        ([1.0, [2.0, 3.0]], [1.0, 2.0, 3.0]),
        ([[1.0], [2.0]], [1.0, 2.0]),
        ([1.0, 2.0], 2.0),
    ],
)
def test_no_round_of_a_batch_overwrites_the_list_of_another(rounds, together):
    metrics = {}
    for value in rounds:
        metrics = _together(metrics, {"mine": value, "hybrid/sync_seconds": 1.0})
    assert metrics == {"mine": together, "hybrid/sync_seconds": 2.0}
