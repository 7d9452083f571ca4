"""What each algorithm says of groups, and what a run makes of it."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import TrainerCallback
from trlx_hybrid import GRPOTrainer, hookimpl
from trlx_hybrid.contract.protocols import Algorithm, Groups
from trlx_hybrid.errors import ComponentError, ConfigError
from trlx_hybrid.testing.conformance import check_algorithm
from trlx_hybrid_algorithms.advantages import LeaveOneOut, OptimalBaseline, PassAtK
from trlx_hybrid_algorithms.curriculum import Curriculum, CurriculumOptions
from trlx_hybrid_algorithms.rewards import LengthReward, LengthRewardOptions
from trlx_hybrid_algorithms.sampling import DynamicSampling, DynamicSamplingOptions

NAN = float("nan")


def groups(rewards, lengths=None, rows=None, weights=(1.0,)):
    totals = torch.tensor(rewards, dtype=torch.float32)
    rewards = totals.unsqueeze(-1) if totals.ndim == 2 else totals
    lengths = torch.ones(rewards.shape[:2], dtype=torch.int64) if lengths is None else torch.tensor(lengths)
    return Groups(rewards, torch.tensor(weights), lengths, lengths < 0, rows or [None] * len(rewards))


def test_groups_are_kept_where_rewards_differ():
    found = DynamicSampling(DynamicSamplingOptions(), each=False).keep(
        groups([[0, 0, 0], [0, 1, 0], [NAN, 1, 1], [NAN, 1, 2], [NAN, NAN, NAN], [NAN, NAN, 1]])
    )
    assert found == [False, True, False, True, False, False]


def test_functions_are_weighed_as_trl_does():
    seen = groups([[[1.0, 2.0], [NAN, 4.0], [NAN, NAN]]], weights=(1.0, 0.5))
    assert torch.equal(seen.totals.nan_to_num(nan=-1.0), torch.tensor([[2.0, 2.0, -1.0]]))


REWARDS = arrays("float32", st.tuples(st.integers(1, 4), st.integers(2, 6)), elements=st.floats(-4, 4, width=16))


@given(REWARDS)
def test_each_completion_is_held_against_the_others(rewards):
    found = LeaveOneOut().advantages(groups(rewards))
    for group, advantages in zip(rewards, found.tolist(), strict=True):
        others = [(group.sum() - reward) / (len(group) - 1) for reward in group]
        assert advantages == pytest.approx([r - o for r, o in zip(group, others, strict=True)], abs=1e-4)


@given(REWARDS)
def test_a_baseline_weighted_by_equal_lengths_is_the_mean(rewards):
    seen = groups(rewards)
    found = OptimalBaseline().advantages(seen)
    assert torch.allclose(found, seen.totals - seen.totals.mean(1, keepdim=True), atol=1e-5)


def test_longer_completions_move_the_baseline_more():
    assert OptimalBaseline().advantages(groups([[0.0, 1.0, NAN]], [[1, 3, 9]])).tolist() == [[-0.75, 0.25, 0.0]]


def test_only_the_best_of_a_group_adds_to_it():
    found = PassAtK().advantages(groups([[0.0, 1.0, 0.25], [1.0, 1.0, 0.0], [NAN, 0.5, NAN]]))
    assert found.tolist() == [[0.0, 0.75, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_short_right_answers_earn_more_and_long_wrong_ones_less():
    seen = groups([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, NAN]], [[10, 30, 10, 30], [7, 7, 7, 7]])
    found = LengthReward(LengthRewardOptions(weight=0.2)).rewards(seen)[..., 0]
    assert torch.allclose(found[0], torch.tensor([1.1, 0.9, 0.0, -0.1]))
    assert torch.allclose(found[1, :3], torch.ones(3))
    assert found[1, 3].isnan()


def test_length_counts_where_another_function_speaks_and_among_those_that_have_a_reward():
    rewards = [[[NAN, 1.0], [1.0, NAN], [NAN, NAN], [1.0, 0.0]]]
    seen = groups(rewards, [[100, 200, 0, 200]], weights=(0.0, 2.0))
    found = LengthReward(LengthRewardOptions(weight=0.4, right=2.0)).rewards(seen)
    assert found[0, 0, 1] == pytest.approx(1.1)  # of which the weight makes 0.2
    assert found[0, 1].nan_to_num(nan=-1).tolist() == [1.0, -1.0]  # only a function without weight has spoken
    assert found[0, 2].isnan().all()
    assert found[0, 3].tolist() == pytest.approx([1.0, -0.1])


def test_groups_are_kept_by_one_function_or_by_any():
    seen = groups([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]], weights=(1.0, 1.0))
    assert DynamicSampling(DynamicSamplingOptions(), each=False).keep(seen) == [False, True, False]
    assert DynamicSampling(DynamicSamplingOptions(), each=True).keep(seen) == [True, True, False]
    assert DynamicSampling(DynamicSamplingOptions(function=0), each=False).keep(seen) == [True, False, False]
    with pytest.raises(ConfigError, match="function=2, and there are 2 reward functions"):
        DynamicSampling(DynamicSamplingOptions(function=2), each=False).keep(seen)


def test_a_share_of_prompts_is_drawn_whatever_is_known():
    curriculum = Curriculum(CurriculumOptions(explore=0.3), seed=3)
    curriculum.observe(groups([[1.0, 1.0]] * 99 + [[0.0, 1.0]], rows=list(range(100))))
    drawn = [row for _ in range(2000) for row in curriculum.draw(1, 100)]
    assert sum(row == 99 for row in drawn) / len(drawn) == pytest.approx(0.7 + 0.3 / 100, abs=0.04)


def test_prompts_that_are_sometimes_solved_are_drawn_most():
    curriculum = Curriculum(CurriculumOptions(explore=0.01), seed=1)
    never, always, half = range(10), range(10, 20), range(20, 30)
    rates = [[0.0, 0.0]] * 10 + [[1.0, 1.0]] * 10 + [[0.0, 1.0]] * 10
    curriculum.observe(groups(rates, rows=list(range(30))))
    drawn = [row for _ in range(200) for row in curriculum.draw(5, 30)]
    assert sum(row in half for row in drawn) > 0.9 * len(drawn)
    assert {row in never for row in drawn} == {row in always for row in drawn} == {True, False}
    assert all(len(set(curriculum.draw(30, 30))) == 30 for _ in range(3))


@pytest.fixture
def curriculum(run, tmp_path):
    """A run in which prompts with an odd number are solved half of the time, the others never."""

    class Watch:
        rows = ()

        def __init__(self):
            self.rows = []

        @hookimpl
        def trlx_rollout_end(self, session, trajectories):
            self.rows.append([row["index"] for row in session.rows])

    def half_solved(prompts, index, completion_ids, **_):
        return [float(number % 2 * (i % 2)) for i, number in enumerate(index)]

    def start(**given):
        watch = Watch()
        hybrid = {"algorithm": ["curriculum"], "algorithm_options": {"curriculum": {"explore": 0.05}}}
        arguments = {"reward_funcs": half_solved, "output_dir": str(tmp_path / "run"), "plugins": [watch]}
        return run(GRPOTrainer, hybrid=hybrid, **arguments | given), watch.rows

    return start


def test_a_curriculum_chooses_the_prompts_and_goes_on_from_a_checkpoint(curriculum, tmp_path):
    whole, rows = curriculum(max_steps=24, save_strategy="steps", save_steps=12)
    assert all(batch[0] == batch[3] and batch[4] == batch[7] for batch in rows)
    early, late = rows[:8], rows[16:]
    solved = [sum(number % 2 for batch in part for number in batch) for part in (early, late)]
    assert solved[1] > solved[0]
    state = json.loads((tmp_path / "run" / "checkpoint-12" / "hybrid_state.json").read_text())
    assert state["algorithms"]["curriculum"]["draws"] == 12
    resumed, again = curriculum(max_steps=24, resume=str(tmp_path / "run" / "checkpoint-12"))
    assert again == rows[12:]
    assert resumed.logs[-2]["reward"] == whole.logs[-2]["reward"]


def test_several_algorithms_act_together(run):
    """Filtered by what the functions say, shaped afterwards, weighed last; and each is named in the header."""
    names = ["dynamic_sampling", "length_reward", "leave_one_out", "positive_nll"]
    batches = []

    class Watch:
        @hookimpl
        def trlx_rollout_end(self, session, trajectories):
            batches.append(list(trajectories))

    def right(completion_ids, **_):
        return [float(ids[0] % 2) for ids in completion_ids]

    hybrid = {"engine": "vllm", "algorithm": names, "algorithm_options": {"length_reward": {"weight": 0.5}}}
    finished = run(GRPOTrainer, hybrid=hybrid, plugins=[Watch()], reward_funcs=right, max_steps=2, log_completions=True)
    for trajectories in batches:
        for group in (trajectories[:4], trajectories[4:]):
            lengths = [sum(t.loss_mask) for t in group]
            for t in group:
                plain = float(t.completion_ids[0] % 2)
                spread = max(lengths) - min(lengths)
                bonus = 0.5 - (sum(t.loss_mask) - min(lengths)) / spread if spread else 0.0
                assert t.reward == pytest.approx(plain + 0.5 * (bonus if plain else min(bonus, 0)), abs=1e-5)
    header = "\n".join(finished.trainer.session.header_lines)
    for name in names:
        assert f"algorithm={name} (HybridConfig.algorithm)" in header
    logged = finished.trainer._logs
    assert all(a > 0 for a, r in zip(logged["advantages"], logged["rewards"]["right"], strict=True) if r > 1.2)
    assert "length_reward: up to 0.25 more for the shortest right completion of a group" in header
    assert all(log["hybrid/loss/positive_nll"] > 0 for log in finished.trainer.state.log_history if "loss" in log)


@pytest.mark.parametrize("scoring", [{}, {"scoring": "packed"}, {"scoring": "joined"}])
def test_a_term_is_in_the_loss_and_in_its_gradient(run, scoring):
    """With a learning rate of 0 the runs differ by the term alone: the loss by its value; and gradients add up."""
    joined = {"scoring": "packed", "scoring_options": {"adaptive_checkpointing": True, "joined": True}}
    hybrid = joined if scoring == {"scoring": "joined"} else scoring
    runs = [
        run(
            GRPOTrainer,
            hybrid={**hybrid, **chosen},
            max_steps=1,
            learning_rate=0.0,
            max_grad_norm=1e9,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
        )
        for chosen in (
            {},
            {"algorithm": ["positive_nll"], "algorithm_options": {"positive_nll": {"weight": 0.5}}},
            {"algorithm": ["positive_nll"], "algorithm_options": {"positive_nll": {"weight": 1.0}}},
        )
    ]
    losses = [one.logs[0]["loss"] for one in runs]
    term = runs[1].trainer.state.log_history[0]["hybrid/loss/positive_nll"]
    assert term > 0
    assert losses[1] - losses[0] == pytest.approx(term, rel=1e-3)
    assert losses[2] - losses[0] == pytest.approx(2 * term, rel=1e-3)
    norms = [one.logs[0]["grad_norm"] for one in runs]
    assert len(set(norms)) == 3


@pytest.mark.parametrize(
    ("hybrid", "message"),
    [
        ({"algorithm": ["leave_one_out", "pass_at_k"]}, "'leave_one_out' and 'pass_at_k' both decide about advantages"),
        ({"algorithm": ["leave_one_out"] * 2}, "names 'leave_one_out' twice"),
        ({"algorithm": ["leave_one_out"], "algorithm_options": {"curriculum": {}}}, "no setting 'curriculum'"),
        ({"algorithm": "dynamic_smpling"}, "No plugin offers algorithm 'dynamic_smpling'. Did you mean 'dynamic_samp"),
        ({"algorithm": ["curriculum"], "algorithm_options": {"curriculum": {"explore": 0}}}, "explore=0 must be above"),
        ({"algorithm": ["curriculum"], "algorithm_options": {"curriculum": {"lowest": 2}}}, "lowest=2 must be below"),
        ({"algorithm": ["curriculum"], "algorithm_options": {"curriculum": 2}}, "must be a mapping, got 2"),
    ],
)
def test_choices_that_cannot_be(run, hybrid, message):
    from trlx_hybrid.errors import HybridError

    with pytest.raises(HybridError, match=message):
        run(GRPOTrainer, hybrid=hybrid, train=False)


def test_a_term_of_the_loss_is_not_missed_where_nothing_is_trained(run):
    hybrid = {"algorithm": "positive_nll", "rollout_only": True}
    logs = run(GRPOTrainer, hybrid=hybrid, max_steps=1).logs
    assert logs[0]["loss"] == 0.0


def test_what_a_term_adds_to_the_metrics_is_logged(run):
    """It is computed after the rollout, whose metrics are in the log already, and before the next one."""

    class Counts(Algorithm):
        name = "counts"

        def __init__(self, session):
            self.session = session

        def loss(self, scores, batch):
            self.session.metrics["hybrid/counted"] = float(batch["completion_mask"].sum())

    class Offers:
        @hookimpl
        def trlx_register(self, registry):
            registry.offer("algorithm", "counts", lambda session, options: Counts(session))

    finished = run(GRPOTrainer, hybrid={"algorithm": ["counts"]}, plugins=[Offers()], max_steps=2)
    logs = [log for log in finished.trainer.state.log_history if "loss" in log]
    assert [log["hybrid/counted"] for log in logs] == [8 * log["completions/mean_length"] for log in logs]


def test_what_a_phase_of_ones_own_measures_is_not_logged_as_the_trainers(run):
    class Samples(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            with trainers[0].session.rollout_phase(training=False):
                trainers[0].session.metrics["hybrid/own"] = 1.0

    trainers = []
    finished = run(GRPOTrainer, hybrid={"engine": "vllm"}, train=False, max_steps=2, num_iterations=2)
    trainers.append(finished.trainer)
    finished.trainer.add_callback(Samples())
    finished.trainer.train()
    assert all("hybrid/own" not in log for log in finished.trainer.state.log_history)


def test_a_loss_of_ones_own_that_scores_nothing_is_named(run):
    class Own(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return sum(p.sum() for p in model.parameters() if p.requires_grad) * 0.0

    with pytest.raises(ComponentError, match=r"'positive_nll' adds to the loss, and .*Own._compute_loss computes it"):
        run(Own, hybrid={"algorithm": ["positive_nll"]}, max_steps=1)


def test_a_batch_of_ones_own_and_advantages_exclude_each_other(run):
    class Own(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions(inputs)

    with pytest.raises(ConfigError, match=r"Own._generate_and_score_completions may change which rows"):
        run(Own, hybrid={"algorithm": ["leave_one_out"]}, train=False)


def test_two_sources_of_advantages_are_refused_with_both_names(run):
    class Advises:
        @hookimpl
        def trlx_advantages(self, session, batch):
            return None

    with pytest.raises(ConfigError, match=r"algorithm='leave_one_out' and plugin 'Advises-0' .*disable_plugins="):
        run(GRPOTrainer, hybrid={"algorithm": ["leave_one_out"]}, plugins=[Advises()], train=False)


@pytest.mark.parametrize(
    "names",
    [
        *([name] for name in ("dynamic_sampling", "curriculum", "length_reward", "positive_nll")),
        *([name] for name in ("leave_one_out", "optimal_baseline", "pass_at_k")),
        ["dynamic_sampling", "curriculum", "length_reward", "leave_one_out", "positive_nll"],
    ],
    ids="-".join,
)
def test_they_do_what_others_must(tiny_trainer, names):
    check_algorithm(tiny_trainer(hybrid={"algorithm": names}), per_token=True)
