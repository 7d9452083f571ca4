"""Environments chosen by name, of the example's wheel, and `trlx-hybrid environments`."""

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trlx_hybrid
from trl import GRPOConfig, RLOOConfig
from trlx_hybrid import HybridConfig, HybridEngine, hookimpl
from trlx_hybrid.commands.main import main
from trlx_hybrid.contract.protocols import EnvironmentArguments
from trlx_hybrid.errors import ComponentError, ConfigError
from trlx_hybrid.plugins.host import Host
from trlx_hybrid.testing.chat import chat_tokenizer, chatty_model
from trlx_hybrid_multiturn import Step, episode_reward, episodes

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "multi-turn.md").read_text()
CALLS = [
    '<tool_call>\n{"name": "guess", "arguments": {"number": NUMBER}}\n</tool_call>'.replace("NUMBER", n) for n in "12"
]
TURNS = [" 1", " 2", " 3", " 4"]  # tokens of their own, beside those of single characters


@pytest.fixture(scope="module")
def wheel(made_once):
    (built,) = made_once("guess", build).glob("*.whl")
    return built


def build(folder):
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated", "wheel", "-q", "--no-index")
    project = ROOT / "examples" / "environment_guess"
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", folder, project], check=True, timeout=300)


@pytest.fixture
def installed(wheel, monkeypatch):
    """The example's distribution, found as an installed one is."""
    monkeypatch.syspath_prepend(str(wheel))


@pytest.fixture
def offering(monkeypatch):
    """Makes a host whose only plugin offers what a factory makes, and the command line use it."""

    def make(factory, name="mine"):
        plugin = SimpleNamespace(trlx_register=hookimpl(lambda registry: registry.offer("environment", name, factory)))
        plugin.trlx_register.__name__ = "trlx_register"
        host = Host()
        host.register(plugin, "mine", distribution="trlx-mine", version="1.2")
        monkeypatch.setattr(Host, "load", lambda *_: host)
        return plugin

    return make


@pytest.fixture
def answer(monkeypatch):
    return lambda *lines: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


# --- chosen by name ---------------------------------------------------------------------------------------------------


class Rollouts(list):
    """What was sampled: tokens and reward of each trajectory."""

    @hookimpl
    def trlx_rollout_end(self, trajectories):
        self += [(t.prompt_ids, t.completion_ids, t.loss_mask, t.reward) for t in trajectories]


def by_hand_in_steps():
    from trlx_guess.games import GuessingGame

    return {"rollout_func": episodes(GuessingGame, max_turns=3), "reward_funcs": episode_reward}


def by_hand_with_tools():
    from trlx_guess.games import GuessingTool

    return {"environment_factory": GuessingTool}


@pytest.mark.parametrize(
    ("name", "by_hand", "engine", "rollout"),
    [
        ("guess", by_hand_in_steps, "vllm", "rollout=multi_turn (rollout_func)"),
        ("guess_tool", by_hand_with_tools, "vllm", "rollout=multi_turn (tools)"),
        ("guess_tool", by_hand_with_tools, None, "engine=transformers (default): generation is TRL's own"),
    ],
)
def test_a_name_trains_as_what_it_stands_for(installed, run, capfd, name, by_hand, engine, rollout):
    from datasets import Dataset

    def train(hybrid, **given):
        turns = CALLS if name == "guess_tool" else TURNS
        tokenizer = chat_tokenizer(turns)
        settings = {
            "max_completion_length": 200,
            "max_steps": 2,
            "vllm_max_model_length": 800,
            "temperature": 0.5,
            "optim": "sgd",
        }
        given = settings | {"train_dataset": None, "reward_funcs": None, "plugins": [rollouts := Rollouts()]} | given
        model = chatty_model(tokenizer, turns)
        done = run(trlx_hybrid.GRPOTrainer, model=model, processing_class=tokenizer, hybrid=hybrid, **given)
        return done.weights(), rollouts

    flags = ["--environment", name, "--environment_options", '{"highest": 5, "guesses": 3}']
    (config,) = trlx_hybrid.TrlParser((HybridConfig,)).parse_args_and_config(
        [*flags, *(["--engine", engine] * bool(engine))]
    )
    weights, named = train(config)
    header = capfd.readouterr().err
    assert f"environment={name} (HybridConfig.environment)" in header
    assert rollout in header
    assert "the trainer has no tools" not in header
    rows = [{"prompt": [{"role": "user", "content": ""}], "number": n, "highest": 5} for n in range(1, 6)]
    expected, ours = train({"engine": engine}, train_dataset=Dataset.from_list(rows), **by_hand())
    assert "environment=" not in capfd.readouterr().err
    assert named == ours
    assert len({reward for *_, reward in named}) > 1  # so that something is learned
    for key, value in expected.items():  # the order in which conversations meet in a batch moves the last digits
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)


def test_the_scripts_own_rewards_and_rows_are_kept(installed, run, prompts):
    from trlx_guess.plugin import GuessOptions, rows

    def short(completion_ids, **_):
        return [-float(len(ids)) for ids in completion_ids]

    tokenizer, mine = chat_tokenizer(TURNS), rows(GuessOptions(highest=3))
    given = {"reward_funcs": short, "train_dataset": mine, "processing_class": tokenizer, "train": False}
    hybrid = {"environment": "guess", "engine": "vllm"}
    trainer = run(trlx_hybrid.GRPOTrainer, model=chatty_model(tokenizer, TURNS), hybrid=hybrid, **given).trainer
    assert trainer.reward_funcs == [short]
    assert trainer.train_dataset is mine
    assert trainer.rollout_func.max_turns == 4


@pytest.mark.parametrize(
    ("hybrid", "given", "error", "message"),
    [
        ({"environment": "gues"}, {}, ComponentError, "environment 'gues'. Did you mean 'guess'.*guess, guess_tool"),
        (
            {"environment": "guess", "environment_options": {"highst": 3}},
            {},
            ConfigError,
            "environment_options for environment 'guess' has no setting 'highst'. Did you mean 'highest'",
        ),
        ({"environment": "guess"}, {}, ConfigError, r"'multi_turn', and TRL's own generation is in use.*engine='vllm'"),
        (
            {"environment": "guess_tool"},
            {"rollout_func": print},
            ConfigError,
            "environment='guess_tool' and rollout_func= are both set.*Drop one",
        ),
        (
            {"environment": "guess"},
            {"environment_factory": dict},
            ConfigError,
            "environment='guess' and environment_factory= are both set.*Drop one",
        ),
    ],
)
def test_refused_before_a_model_is_loaded(installed, tmp_path, hybrid, given, error, message):
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(error, match=message):
        trlx_hybrid.GRPOTrainer("no/such/model", args=args, hybrid=hybrid, **given)


def test_a_trainer_that_plays_nothing_refuses_an_environment(installed, tmp_path):
    args = RLOOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match=r"brings rollout_func, which RLOOTrainer does not take. Train with GRPO"):
        trlx_hybrid.RLOOTrainer("no/such/model", args=args, hybrid={"environment": "guess"})
    with pytest.raises(ConfigError, match=r"leave HybridConfig\.environment out"):
        HybridEngine(None, None, None, config=HybridConfig(environment="guess"))


def test_options_without_an_environment_and_an_environment_without_anything_are_refused():
    with pytest.raises(ConfigError, match="environment_options is set, and no environment"):
        HybridConfig(environment_options='{"highest": 3}')
    for given in ({}, {"rollout_func": print, "environment_factory": print}):
        with pytest.raises(ComponentError, match="either rollout_func or environment_factory"):
            EnvironmentArguments(**given)


def test_a_plugin_that_offers_something_else_is_named(offering, tmp_path):
    plugin = offering(lambda session, options: dict)
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(
        ComponentError, match=r"'mine' \(plugin 'mine', trlx-mine 1.2\) made a type without .*reward_fun"
    ):
        trlx_hybrid.GRPOTrainer("no/such/model", args=args, hybrid={"environment": "mine"}, plugins=[plugin])


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_output_on_the_page_is_the_real_one(installed, capsys, monkeypatch):
    shown = re.findall(
        r"^\$ (?:(?:printf '(.*)' \| )?trlx-hybrid (environments.*))\n((?:.*\n)*?)```", PAGE, re.MULTILINE
    )
    assert len(shown) == 2
    for lines, command, output in shown:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines.replace("\\n", "\n")))
        assert main(command.split()) == 0
        assert capsys.readouterr().out == output


def test_no_environment_is_installed_here(capsys):
    assert main(["environments"]) == 0
    assert capsys.readouterr().out == "no plugin offers an environment\n"


def test_calls_are_typed_and_tools_answer(installed, capsys, answer):
    answer('{"name": "guess", "arguments": {"number": 2}}', '{"name": "gess"}', "I give up")
    assert main(["environments", "try", "guess_tool", "--options", '{"highest": 2}', "--episodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "tools      guess(number: int) -> str\nuser       I think of a number from 1 to 2." in out
    assert "tool       lower\n" in out
    assert "tool       {'error': 'Tool gess not found.'}\n" in out
    assert "over       after 3 turns\nreward     0\n" in out
    assert "note       there are no more answers\n\nresult     no problems found\n" in out


def test_a_model_answers(installed, capsys, tmp_path):
    tokenizer = chat_tokenizer(TURNS + CALLS)
    tokenizer.save_pretrained(tmp_path)
    chatty_model(tokenizer, TURNS + CALLS).save_pretrained(tmp_path)
    for name, answered in (("guess", "lower"), ("guess_tool", "tool       ")):
        given = ["--model", str(tmp_path), "--episodes", "4", "--turns", "3"]
        assert main(["environments", "try", name, *given]) == 0
        out = capsys.readouterr().out
        assert out.count("over       after") == 4
        assert answered in out or "higher" in out
        assert "no problems found" in out


class Game:
    """Right, and wrong in one place below."""

    turns = 0

    def reset(self, row):
        return f"from {row['start']}"

    def step(self, completion):
        return Step(observation="more", done=completion == "end", reward=1.0)


def wrong(**methods):
    return lambda: type("Wrong", (Game,), methods)()


def dice(self, row):
    import random

    return f"{random.random()}"


def divides(self, completion):
    return Step(done=True, reward=1 / 0)


class Tool:
    def reset(self, **row):
        return None

    def undescribed(self, number):
        return "something"

    def get_reward(self):
        return 1.0


class Described(Tool):
    undescribed = None

    def get_reward(self):
        return "good"


class Unrewarded:
    def reset(self, **row):
        return None


ROWS = {"train_dataset": lambda: [{"prompt": [{"role": "user", "content": "begin "}], "start": 3}]}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Game, None),
        (wrong(reset=dice), "`reset` showed '.*' and then '.*' for the same row. Draw from the row, or from random"),
        (wrong(reset=lambda self, row: row["end"]), r"`reset` raised KeyError: 'end' \(.*test_environments.py:\d+\)."),
        (wrong(reset=lambda self, row: 7), "`reset` showed 7. Show a text, or chat messages"),
        (wrong(step=divides), r"`step` raised ZeroDivisionError: .* \(.*test_environments.py:\d+\). In training"),
        (
            wrong(step=lambda self, c: ("more", 1.0)),
            "`step` returned a tuple without observation, done, reward. Return",
        ),
        (wrong(step=lambda self, c: Step(done=True, reward="1")), "`step` gave the reward '1'. Give a finite number"),
        (
            wrong(step=lambda self, c: Step(done=True, reward=torch.ones(2))),
            r"`step` gave the reward tensor\(\[1., 1.\]\). Give a finite number",
        ),
        (wrong(step=lambda self, c: Step(reward=1.0)), "`step` is not done, and has nothing to show. Give"),
        (wrong(step=None), "Wrong has no method `step`. Give it one."),
    ],
)
def test_mistakes_of_environments_with_steps_are_named(offering, capsys, answer, factory, message):
    offering(
        lambda session, options: EnvironmentArguments(
            rollout_func=episodes(factory), reward_funcs=episode_reward, **ROWS
        )
    )
    answer("go", "end")
    assert main(["environments", "try", "mine"]) == int(message is not None)
    out = capsys.readouterr().out
    if message is None:
        assert "user       begin from 3\nassistant  go\nreward     1\nuser       more\nassistant  end\n" in out
        assert "over       after 2 turns, reward 2\n\nresult     no problems found\n" in out
    else:
        assert re.search(f"^problem    .*{message}", out, re.MULTILINE)
        assert out.endswith("result     1 problem, see above\n")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Tool, "the tool `undescribed` cannot be described to a model: .* type hint.*`Args:` in its docstring"),
        (Described, "`get_reward` gave the reward 'good'. Give a finite number"),
        (Unrewarded, "there is no reward. Give the class a method `get_reward`, or bring reward_funcs"),
        (object, "object has no method `reset`"),
    ],
)
def test_mistakes_of_environments_with_tools_are_named(offering, capsys, answer, factory, message):
    offering(lambda session, options: EnvironmentArguments(environment_factory=factory))
    answer("nothing")
    assert main(["environments", "try", "mine"]) == 1
    assert re.search(f"^problem    .*{message}", capsys.readouterr().out, re.MULTILINE | re.DOTALL)


def test_a_row_can_be_given_where_there_is_no_dataset(offering, capsys, answer):
    offering(lambda session, options: EnvironmentArguments(rollout_func=episodes(Game)))
    answer("end")
    assert main(["environments", "try", "mine"]) == 1
    assert "columns prompt: read those, or give one with --row or with a train_dataset." in capsys.readouterr().out
    assert main(["environments", "try", "mine", "--row", '{"start": 9}']) == 0
    assert "user       from 9\nassistant  end\n" in capsys.readouterr().out
    assert main(["environments", "try", "mine", "--row", "9"]) == 1
    assert "--row takes an object with the columns of a row, got 9." in capsys.readouterr().err


def test_what_cannot_be_played_by_hand_is_said(offering, capsys):
    def broken():
        raise OSError("no such server")

    for made, message in (
        (lambda: EnvironmentArguments(rollout_func=print), "rollout_func without an attribute `factory`"),
        (lambda: EnvironmentArguments(rollout_func=episodes(Game), train_dataset=list), "has no rows"),
        (
            lambda: EnvironmentArguments(rollout_func=episodes(Game), train_dataset=broken),
            "raised OSError: no such server",
        ),
        (broken, "failed in `factory`: OSError: no such server"),
    ):
        offering(lambda session, options, made=made: made())
        assert main(["environments", "try", "mine"]) == 1
        told = capsys.readouterr().err
        assert message in told
        ends = "#componenterror" if "failed" in message else "#configerror" if "factory" in message else "#mistakeerror"
        assert ends in told
