"""Batches that are sampled in rounds: what is trained on, against what TRL does with the same rows."""

import math
from collections import Counter
from typing import ClassVar

import pytest
import torch
from datasets import Dataset
from trlx_hybrid import GRPOTrainer, RLOOTrainer, hookimpl
from trlx_hybrid.contract.protocols import Algorithm
from trlx_hybrid.errors import ComponentError, ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid.testing.models import sorting_prompts
from trlx_hybrid_multiturn.environment import Step
from trlx_hybrid_multiturn.rollout_func import episodes

VLLM = {"engine": "vllm"}
TURNS = ['<tool_call>\n{"name": "double", "arguments": {"number": 3}}\n</tool_call>', "six"]
SPOKEN = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": f"double {i}"}] for i in range(16)], "index": list(range(16))}
)


class Watch:
    """A plugin that keeps what each batch was, and a reward that is the same for a group unless its prompt is odd.

    The tiny model's answers say nothing, so what a prompt earns is decided by its number, and within a group by the
    order in which its completions come.
    """

    __name__ = "odd"

    def __init__(self):
        self.batches, self.asked, self.seen = [], [], Counter()

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        if session.training:
            self.batches.append((list(trajectories), list(session.rows), dict(session.metrics)))

    def __call__(self, prompts, completion_ids, index, **_):
        self.asked.append(list(index))
        rewards = []
        for number in index:
            self.seen[number] += 1
            rewards.append(float(number % 2 * (self.seen[number] % 2)))
        return rewards


@pytest.fixture
def sampled(run):
    """A run with dynamic sampling, and what was watched of it."""

    def start(options=None, trainer=GRPOTrainer, hybrid=None, **given):
        watch = Watch()
        given = {"reward_funcs": watch, "plugins": [watch], "learning_rate": 0.1, "optim": "sgd"} | given
        chosen = {"algorithm": ["dynamic_sampling"], "algorithm_options": {"dynamic_sampling": options or {}}}
        return run(trainer, hybrid=(hybrid or VLLM) | chosen, **given), watch

    return start


def numbers(rows):
    return [row["index"] for row in rows]


def test_every_group_that_is_trained_on_has_a_gradient(sampled):
    finished, watch = sampled({"rounds": 8}, max_steps=4)
    assert len(watch.batches) == 4
    rounds = 0
    for trajectories, rows, metrics in watch.batches:
        assert all(number % 2 for number in numbers(rows))
        assert all(len({*numbers(rows)[at : at + 4]}) == 1 for at in (0, 4))
        assert {t.reward for t in trajectories[:4]} == {t.reward for t in trajectories[4:]} == {0.0, 1.0}
        assert metrics["hybrid/kept_groups"] >= 2
        assert metrics["hybrid/sampled_reward"] == pytest.approx(
            0.5 * metrics["hybrid/kept_groups"] / metrics["hybrid/sampled_groups"]
        )
        assert metrics["hybrid/sync_seconds"] > 0  # of the first round
        rounds += metrics["hybrid/rounds"]
    assert rounds > 4  # the shuffled dataset has even prompts in its first batches
    assert len(watch.asked) == rounds  # each round is scored once, by the user's function
    logs = [log for log in finished.trainer.state.log_history if "frac_reward_zero_std" in log]
    assert [log["frac_reward_zero_std"] for log in logs] == [0.0] * 4
    assert "algorithm=dynamic_sampling (HybridConfig.algorithm)" in finished.trainer.session.header_lines[0]


def test_a_batch_of_rounds_is_the_batch_that_trl_makes_of_those_rows(sampled, monkeypatch):
    """Prompts, completions, log-probs, rewards, advantages: held against what belongs to each row."""
    import trl

    batches = []
    stock = trl.GRPOTrainer._generate_and_score_completions

    def keeping(self, inputs):
        batches.append(stock(self, inputs))
        return batches[-1]

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", keeping)
    finished, watch = sampled({"rounds": 8}, hybrid=VLLM | {"scoring": "padded"}, max_steps=3)
    tokenizer = finished.trainer.processing_class
    for batch, (trajectories, rows, _) in zip(batches, watch.batches, strict=True):
        for i, (trajectory, row) in enumerate(zip(trajectories, rows, strict=True)):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            assert tokenizer.decode(prompt) == row["prompt"]
            assert prompt == trajectory.prompt_ids
            ids = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
            assert ids == trajectory.completion_ids
            sampled_as = batch["sampling_per_token_logps"][i][: len(ids)]
            assert torch.allclose(sampled_as, torch.tensor(trajectory.logprobs).flatten())
            assert torch.allclose(sampled_as, batch["old_per_token_logps"][i][: len(ids)], atol=1e-5)
        rewards = torch.tensor([t.reward for t in trajectories]).view(-1, 4)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        assert torch.allclose(batch["advantages"], expected.flatten())


@pytest.mark.parametrize("options", [{"rounds": 4}, {"rounds": 4, "oversampling": 3}], ids=["rounds", "oversampling"])
def test_a_reward_function_may_edit_all_that_it_is_given(sampled, options):
    """End tokens, messages and nested values of the dataset: the run is the one whose function only looks."""
    ends = {"generation_kwargs": {"stop_token_ids": list(range(10, 30))}}
    rows = SPOKEN.map(lambda row: {"answer": {"parts": [row["index"]]}})
    tokenizer = chat_tokenizer(TURNS)

    class Editing(Watch):
        edits = False

        def __call__(self, prompts, completions, completion_ids, index, answer, **columns):
            rewards = super().__call__(prompts, completion_ids, index)
            for place, parts in enumerate(a["parts"] for a in answer):
                rewards[place] += len(parts) - 1
            if self.edits:
                for ids, said, asked, known in zip(completion_ids, completions, prompts, answer, strict=True):
                    ids.pop()
                    said[0]["content"] = asked[0]["content"] = "edited"
                    known["parts"].append(0)
            return rewards

    found = []
    for edits in (False, True):
        watch = Editing()
        watch.edits = edits
        finished, _ = sampled(
            options,
            train_dataset=rows,
            model=chatty_model(tokenizer, TURNS),
            processing_class=tokenizer,
            reward_funcs=watch,
            plugins=[watch],
            vllm_max_model_length=256,
            max_steps=2,
            **ends,
        )
        finished.close()
        found.append((finished, watch, list(finished.trainer._logs["completion"])))
    (plain, looked, told), (edited, wrote, also) = found
    assert [[t.completion_ids for t in batch] for batch, _, _ in wrote.batches] == [
        [t.completion_ids for t in batch] for batch, _, _ in looked.batches
    ]
    assert [row["answer"] for _, rows, _ in wrote.batches for row in rows] == [
        row["answer"] for _, rows, _ in looked.batches for row in rows
    ]
    assert told == also
    assert plain.logs == edited.logs
    before, after = plain.weights(), edited.weights()
    assert max(float((before[name] - after[name]).abs().max()) for name in before) == 0.0


def test_rounds_draw_the_same_on_the_next_start(sampled):
    (one, seen), (other, again) = sampled({"rounds": 4}), sampled({"rounds": 4})
    assert [numbers(rows) for _, rows, _ in seen.batches] == [numbers(rows) for _, rows, _ in again.batches]
    assert one.logs == other.logs
    for _, rows, _ in seen.batches[1:]:
        assert numbers(rows) != numbers(seen.batches[0][1])


def test_what_a_batch_lacks_counts_for_nothing(sampled, caplog):
    """No prompt is odd but one: the batch's other groups have no gradient, no reward and no tokens in the loss."""
    dataset = Dataset.from_dict({"prompt": [f"sort {i}=" for i in range(8)], "index": [0, 2, 4, 6, 8, 10, 12, 14]})
    finished, watch = sampled({"rounds": 2}, train_dataset=dataset, max_steps=1)
    ((trajectories, _, metrics),) = watch.batches
    assert metrics["hybrid/kept_groups"] == 0
    assert metrics["hybrid/rounds"] == 2
    assert all(t.reward is None for t in trajectories)
    assert all(not any(t.loss_mask) for t in trajectories)
    assert finished.logs[0]["loss"] == finished.logs[0]["grad_norm"] == 0.0
    assert "After 4 groups were sampled, 0 of the 2 that a batch has were kept" in caplog.text


def test_more_prompts_in_the_first_round(sampled):
    _, watch = sampled({"rounds": 1, "oversampling": 3}, max_steps=3)
    assert {len(asked) for asked in watch.asked} == {24}
    for _, rows, metrics in watch.batches:
        assert len(rows) == 8
        assert metrics["hybrid/sampled_groups"] == 6
        assert sum(number % 2 for number in numbers(rows)) >= min(8, 4 * metrics["hybrid/kept_groups"])


def test_the_rest_of_a_run_goes_along(sampled):
    """TRL's own generation; packed scoring; columns that rewards log; an evaluation, which is never filtered."""

    def logging(prompts, completion_ids, index, log_extra, log_metric, **_):
        log_extra("number", list(index))
        log_metric("asked", len(index))
        return watch_reward(prompts, completion_ids, index)

    watch_reward = Watch()
    for hybrid in ({}, {**VLLM, "scoring": "packed"}):
        finished, watch = sampled(
            {"rounds": 8},
            hybrid=hybrid,
            reward_funcs=logging,
            eval_dataset=sorting_prompts(8).add_column("index", list(range(8))),
            eval_strategy="steps",
            eval_steps=2,
            per_device_eval_batch_size=8,
            max_steps=2,
            log_completions=True,
            gradient_accumulation_steps=2,
        )
        trained = finished.trainer._logs["extra"]["number"]
        assert len(trained) == len(finished.trainer._logs["prompt"])
        assert all(number % 2 for _, rows, _ in watch.batches for number in numbers(rows))
        assert any("eval_loss" in log for log in finished.trainer.state.log_history)


def test_tools_converse_in_each_round(sampled):
    def double(number: int) -> int:
        """Twice a number.

        Args:
            number: it.
        """
        return 2 * number

    tokenizer = chat_tokenizer(TURNS)
    finished, watch = sampled(
        {"rounds": 6, "oversampling": 2},
        train_dataset=SPOKEN,
        model=chatty_model(tokenizer, TURNS),
        processing_class=tokenizer,
        tools=[double],
        vllm_max_model_length=2048,
        max_completion_length=256,
        max_steps=2,
    )
    assert all(number % 2 for _, rows, _ in watch.batches for number in numbers(rows))
    assert any(0 in t.loss_mask and 1 in t.loss_mask for batch, _, _ in watch.batches for t in batch)  # a tool answered
    assert finished.trainer.session.rollout.name == "multi_turn"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_dataset": lambda d: d.to_iterable_dataset()}, "training dataset is iterable, so no row can be asked"),
        ({"options": {"rounds": 0}}, "rounds=0, and a batch has at least one"),
        ({"options": {"round": 1}}, r"has no setting 'round'. Did you mean 'rounds'"),
    ],
)
def test_what_cannot_be_resampled(sampled, prompts, given, message):
    if "train_dataset" in given:
        given = {"train_dataset": given["train_dataset"](prompts)}
    with pytest.raises(ConfigError, match=message):
        sampled(**given)


def test_environments_of_trl_are_refused_with_the_way_out(sampled):
    class Game:
        def reset(self, **_):
            return None

        def look(self) -> str:
            """Look."""
            return "nothing"

        def get_reward(self):
            return 0.0

    with pytest.raises(ConfigError, match=r"`environment_factory` once in each batch.*rollout_func=episodes"):
        sampled(environment_factory=Game, processing_class=chat_tokenizer(TURNS), train=False)


def test_episodes_are_played_in_each_round(sampled):
    class Parity:
        """One turn; pays by the row's number."""

        played: ClassVar[Counter] = Counter()

        def reset(self, row):
            self.number = row["index"]

        def step(self, completion):
            Parity.played[self.number] += 1
            return Step(done=True, reward=float(self.number % 2 * (Parity.played[self.number] % 2)))

    tokenizer = chat_tokenizer(TURNS)

    def paid(prompts, completions, episode_reward, **_):
        return list(episode_reward)

    _, watch = sampled(
        {"rounds": 8},
        train_dataset=SPOKEN,
        model=chatty_model(tokenizer, TURNS),
        processing_class=tokenizer,
        rollout_func=episodes(Parity),
        reward_funcs=paid,
        vllm_max_model_length=512,
        max_steps=2,
    )
    for trajectories, rows, _ in watch.batches:
        assert all(number % 2 for number in numbers(rows))
        assert [row["episode_reward"] for row in rows] == [t.reward for t in trajectories]


def test_only_grpo_leaves_rows_out(sampled):
    from trl import RLOOConfig

    with pytest.raises(ConfigError, match="'dynamic_sampling' cannot serve RLOOTrainer: only GRPOTrainer"):
        sampled(trainer=RLOOTrainer, config_class=RLOOConfig, train=False)


class Odd(Algorithm):
    """Answers what a test wants."""

    name = "odd"
    answers: ClassVar[dict] = {}

    def keep(self, groups):
        return self.answers.get("keep", [True] * len(groups))

    def rewards(self, groups):
        return self.answers.get("rewards", lambda r: r)(groups.rewards)

    def advantages(self, groups):
        return self.answers.get("advantages", lambda t: None)(groups.totals)

    def loss(self, scores, batch):
        return self.answers.get("loss")


class Offer:
    @hookimpl
    def trlx_register(self, registry):
        registry.offer("algorithm", "odd", lambda session, options: Odd())


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"keep": [True]}, r"returned 1 values from `keep`, where one for each of 2 groups was expected"),
        ({"keep": [0.47, 0.0]}, r"returned 0\.47 from `keep`, where True or False for each group was expected"),
        ({"rewards": lambda r: r[:1]}, r"a tensor of shape \(1, 4, 1\) from `rewards`, .* of shape \(2, 4, 1\)"),
        ({"advantages": lambda t: t.flatten()}, r"a tensor of shape \(8,\) from `advantages`, .* of shape \(2, 4\)"),
        ({"advantages": lambda t: t * math.nan}, r"returned nan at \(0, 0\) from `advantages`"),
        ({"advantages": lambda t: t.tolist()}, r"returned list from `advantages`, where a tensor of finite numbers"),
        ({"loss": torch.ones(2)}, r"a tensor of shape \(2,\) from `loss`, where a scalar tensor"),
    ],
)
def test_an_answer_that_cannot_be_is_its_authors_fault(run, monkeypatch, answers, message):
    monkeypatch.setattr(Odd, "answers", answers)
    with pytest.raises(ComponentError, match=r"algorithm 'odd' \(plugin 'Offer-0', .*" + message):
        run(GRPOTrainer, hybrid={"algorithm": ["odd"]}, plugins=[Offer()], max_steps=1)
