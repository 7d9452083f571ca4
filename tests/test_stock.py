"""With no component chosen, training is stock TRL bit for bit: plugins installed, an observer watching."""

from types import SimpleNamespace

import pytest
import torch
import trl
import trlx_hybrid
from peft import LoraConfig
from trlx_hybrid import hookimpl
from trlx_hybrid.errors import ConfigError, PluginError
from trlx_hybrid.plugins.host import Host
from trlx_hybrid.trl.rewards import replaced
from trlx_hybrid.trl.state import Batch


class Observer:
    """Implements every observing hook and keeps what it saw."""

    def __init__(self):
        self.trajectories, self.batches, self.events = [], [], []

    @hookimpl
    def trlx_configure(self, session):
        self.events.append("configure")

    @hookimpl
    def trlx_unconfigure(self, session):
        self.events.append("unconfigure")

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        self.trajectories += trajectories

    @hookimpl
    def trlx_advantages(self, session, batch):
        self.batches.append(batch)

    @hookimpl
    def trlx_report_header(self, session):
        return "watched by a test"


def lora():
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=True)


@pytest.mark.parametrize("adapter", [None, lora], ids=["full", "lora"])
def test_hybrid_grpo_without_components_is_stock_trl_bit_for_bit(run, adapter, capsys):
    observer = Observer()
    arguments = {"max_steps": 5, "num_iterations": 2, "beta": 0.1 if adapter else 0.0}
    stock = run(trl.GRPOTrainer, peft_config=adapter and adapter(), **arguments)
    ours = run(trlx_hybrid.GRPOTrainer, peft_config=adapter and adapter(), plugins=[observer], **arguments)

    assert ours.logs == stock.logs  # losses, rewards, entropies, gradient norms, KL: every number of every step
    assert len([log for log in ours.logs if "loss" in log]) == 5
    assert ours.recorder.completions == stock.recorder.completions
    assert ours.recorder.kwargs == stock.recorder.kwargs
    weights, expected = ours.weights(), stock.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)

    assert [t.completion_ids for t in observer.trajectories] == ours.recorder.completions
    assert all(t.reward is not None and t.loss_mask == [1] * len(t.completion_ids) for t in observer.trajectories)
    assert observer.batches[0]["rewards_per_func"].shape == (8, 1)
    assert "watched by a test" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["RLOO", "Distillation"])
def test_the_other_generating_trainers_are_stock_as_well(run, name):
    from trlx_hybrid.testing.models import tiny_model

    config = getattr(trl, f"{name}Config")
    given = {"teacher_model": tiny_model(seed=1)} if name == "Distillation" else {"beta": 0.0}
    stock = run(getattr(trl, f"{name}Trainer"), config_class=config, **given)
    given = {"teacher_model": tiny_model(seed=1)} if name == "Distillation" else {"beta": 0.0}
    observer = Observer()
    ours = run(getattr(trlx_hybrid, f"{name}Trainer"), config_class=config, plugins=[observer], **given)
    assert ours.logs == stock.logs
    assert all(torch.equal(w, stock.weights()[name]) for name, w in ours.weights().items())
    assert observer.trajectories


class Advice:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def trlx_advantages(self, batch):
        return self.answer(batch["advantages"])


def test_a_plugin_may_replace_the_advantages_and_the_header_says_so(run, capsys):
    ours = run(trlx_hybrid.GRPOTrainer, plugins=[Advice(torch.zeros_like)], max_steps=1)
    assert all(log["grad_norm"] == 0 for log in ours.logs if "grad_norm" in log)
    assert "advantages=plugin Advice-0 (this script)" in capsys.readouterr().err


@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
def test_the_table_of_completions_shows_the_advantages_that_are_trained_with(run, trainer):
    counted = Advice(lambda stock: torch.arange(len(stock)) + 100.0)
    given = {"config_class": getattr(trl, f"{trainer}Config"), "plugins": [counted], "max_steps": 1, "beta": 0.0}
    ours = run(getattr(trlx_hybrid, f"{trainer}Trainer"), **given)
    assert list(ours.trainer._logs["advantages"]) == [100.0 + row for row in range(8)]


def test_of_two_plugins_with_advantages_none_is_taken(run):
    with pytest.raises(PluginError, match=r"'Advice-0' \(this script -\) and 'Advice-1' .*Disable all but one"):
        run(trlx_hybrid.GRPOTrainer, plugins=[Advice(torch.zeros_like), Advice(torch.ones_like)], train=False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda stock: stock.tolist(), "a list where a tensor was expected"),
        (lambda stock: stock[:3], r"shape \(3,\) where \(8,\) was expected"),
        (lambda stock: stock * torch.nan, "nan for row 0"),
    ],
    ids=["a list", "another shape", "nan"],
)
def test_advantages_that_cannot_be_used_name_their_plugin(answer, message):
    host = Host()
    host.register(Advice(answer), "mine", distribution="mine-1", version="2")
    with pytest.raises(PluginError, match=rf"Plugin 'mine' \(mine-1 2\) failed in trlx_advantages: .*{message}"):
        replaced(SimpleNamespace(host=host), {"advantages": torch.zeros(8)}, None)


def test_a_scripts_own_plugin_is_not_reported_to_an_author():
    host = Host()
    host.register(Advice(lambda stock: stock[:3]), "Advice-0")
    with pytest.raises(PluginError, match=r"'Advice-0' \(plugins=, this script\) failed in .* Mend it there"):
        replaced(SimpleNamespace(host=host), {"advantages": torch.zeros(8)}, None)


class Metric:
    def __init__(self, value):
        self.value = value

    @hookimpl
    def trlx_rollout_end(self, session):
        session.metrics["hybrid/mine"] = self.value


@pytest.mark.parametrize("value", [1, 0.5, torch.tensor(0.5), [1.0, 0.0]])
def test_a_plugin_may_log_numbers(run, value):
    (log,) = [log for log in run(trlx_hybrid.GRPOTrainer, plugins=[Metric(value)], max_steps=1).logs if "loss" in log]
    assert log["reward"] is not None


@pytest.mark.parametrize("value", ["many", torch.ones(2), [0.5, None]])
def test_what_is_no_number_names_the_metric_and_the_plugins(run, value):
    with pytest.raises(PluginError, match=r"session.metrics\['hybrid/mine'\] is .* set it: one of .*Metric-0"):
        run(trlx_hybrid.GRPOTrainer, plugins=[Metric(value)], max_steps=1)


@pytest.mark.parametrize("converses", [True, False], ids=["multi_turn", "single_turn"])
def test_rows_that_train_nothing_lose_their_rewards_only_where_conversations_break_off(converses):
    """A `rollout_func` of the user's may mask whole rows; TRL counts their rewards."""

    class Own(trl.GRPOTrainer):
        def _calculate_rewards(self):
            return torch.ones(3, 2)

    trainer = object.__new__(trlx_hybrid.hybrid(Own))
    ranks = SimpleNamespace(gather=lambda value: [value])
    none = SimpleNamespace(judges=False)
    session = SimpleNamespace(rollout=SimpleNamespace(converses=converses), ranks=ranks, algorithms=none)
    session.selection = SimpleNamespace(stock=True)
    trainer._run = SimpleNamespace(session=session, batch=Batch(generated=([], [], [[1, 0], [0, 0], [1]])))
    assert trainer._calculate_rewards().isnan().tolist() == [[False] * 2, [converses] * 2, [False] * 2]


def test_a_number_of_one_rollout_is_in_no_other_ones_log(run):
    def trlx_rollout_end(session):
        session.metrics |= {"hybrid/first": 7.0} if session.step == 0 else {}

    plugin = SimpleNamespace(trlx_rollout_end=hookimpl(trlx_rollout_end))
    finished = run(trlx_hybrid.GRPOTrainer, plugins=[plugin], max_steps=2)
    first, second, *_ = finished.trainer.state.log_history
    assert first["hybrid/first"] == 7.0
    assert "hybrid/first" not in second


def test_configure_and_unconfigure_frame_a_session(run):
    observer = Observer()
    ours = run(trlx_hybrid.GRPOTrainer, plugins=[observer], train=False)
    assert observer.events == ["configure"]
    ours.trainer.session.close()
    ours.trainer.session.close()
    assert observer.events == ["configure", "unconfigure"]


def test_classes_are_true_subclasses_made_once():
    assert issubclass(trlx_hybrid.GRPOTrainer, trl.GRPOTrainer)
    assert trlx_hybrid.GRPOTrainer.__name__ == "GRPOTrainer"
    assert trlx_hybrid.hybrid(trl.GRPOTrainer) is trlx_hybrid.GRPOTrainer
    assert trlx_hybrid.hybrid(trlx_hybrid.GRPOTrainer) is trlx_hybrid.GRPOTrainer

    class Mine(trl.GRPOTrainer):
        """A user's own trainer."""

    assert issubclass(trlx_hybrid.hybrid(Mine), Mine)


def test_own_trainers_pass_arguments_to_trl_as_they_like(prompts, tmp_path):
    """Components are chosen from what reaches TRL's `__init__`, whatever the signatures in between."""
    from trlx_hybrid.testing.models import character_tokenizer, tiny_model

    class Passing(trl.GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Deciding(trl.GRPOTrainer):
        def __init__(self, model, reward_funcs, config):
            super().__init__(model, reward_funcs, config, train_dataset=prompts, processing_class=character_tokenizer())

    class Past(trl.GRPOTrainer):
        def __init__(self, *args, **kwargs):
            trl.GRPOTrainer.__init__(self, *args, **kwargs)

    config = trl.GRPOConfig(
        str(tmp_path),
        num_generations=4,
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_max_model_length=77,
        vllm_enable_sleep_mode=True,
    )
    rest = {"train_dataset": prompts, "processing_class": character_tokenizer()}
    given = (tiny_model(), lambda completions, **_: [0.0] * len(completions), config)
    named = dict(zip(("model", "reward_funcs", "args"), given, strict=True)) | rest
    built = [
        trlx_hybrid.hybrid(Passing)(**named),
        trlx_hybrid.hybrid(Passing)(*given, **rest),
        trlx_hybrid.hybrid(Deciding)(*given, hybrid={"engine": "vllm"}),
    ]
    for trainer in built:
        options = trainer.session.selection.engine.options
        assert (options.max_model_len, options.enable_sleep_mode, trainer.use_vllm) == (77, True, True)
        trainer.session.close()
    with pytest.raises(ConfigError, match=r"Past, or a class below it, calls.*by that class's name"):
        trlx_hybrid.hybrid(Past)(**named)
    config.use_vllm = False
    with pytest.raises(ConfigError, match=r"by that class's name"):
        trlx_hybrid.hybrid(Past)(**named, hybrid={"engine": "vllm"})
    trainer = trlx_hybrid.hybrid(Past)(**named)  # nothing was chosen: it is TRL's
    assert trainer.session.selection.stock
    assert not trainer.use_vllm
    trainer.session.close()


def test_a_trainer_may_have_a_name_of_its_own(run):
    """TRL writes it into model cards."""

    class Mine(trl.RLOOTrainer):
        _name = "Mine"

    observer = Observer()
    run(trlx_hybrid.hybrid(Mine), config_class=trl.RLOOConfig, plugins=[observer], beta=0.0, max_steps=1)
    assert all(t.loss_mask == [1] * len(t.completion_ids) for t in observer.trajectories)
    assert all(t.completion is not None for t in observer.trajectories)
    assert observer.trajectories


def test_a_trainer_made_without_init_is_trls_own():
    """TRL's tests call single methods on such instances."""
    trainer = object.__new__(trlx_hybrid.GRPOTrainer)
    for value in (True, False):
        trainer.use_vllm = value
        assert trainer.use_vllm is value
    assert trainer._run is None


@pytest.mark.parametrize("module", ["sdpo.SDPO", "sdft.SDFT", "gold.GOLD", "iw_opd.IWOPD"])
def test_trainers_that_build_their_own_engine_are_refused_by_name(module):
    import importlib

    package, name = module.split(".")
    trainer = getattr(importlib.import_module(f"trl.experimental.{package}"), f"{name}Trainer")
    with pytest.raises(ConfigError, match=f"{name}Trainer builds a vLLM of its own"):
        trlx_hybrid.hybrid(trainer)


def test_trainers_that_do_not_generate_are_refused():
    with pytest.raises(ConfigError, match="SFTTrainer does not generate"):
        trlx_hybrid.hybrid(trl.SFTTrainer)
