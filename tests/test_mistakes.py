"""Mistakes of whoever writes a plugin, a reward or a config: each message names the culprit, the place and the way out.

Most are told when the trainer is made, before a model or an engine is. The others share one trainer with one engine,
whose plugin does what the row says.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig
from trlx_hybrid import GRPOTrainer, HybridConfig, hookimpl
from trlx_hybrid.contract.protocols import Algorithm, EnvironmentArguments, Rollout, Scores, Scoring
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.errors import EngineError, HybridError
from trlx_hybrid.own_loop.hybrid_engine import HybridEngine
from trlx_hybrid.testing.chat import chat_tokenizer
from trlx_hybrid.testing.conformance import check_algorithm
from trlx_hybrid.testing.models import character_tokenizer, tiny_grpo, tiny_model
from trlx_hybrid.trl.replay.recording import RecordedBatch, Recording

ENGINE = {"max_model_len": 64, "max_num_seqs": 8, "enable_sleep_mode": True}
PROMPTS = Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 30 ="] * 4})
NO_MODEL = "nobody/such-model"
"""What is refused before the model is loaded is refused with this one as well."""


def digits(completions, **_):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def offer(slot, name, factory, **declared):
    """A plugin that offers one component."""

    def trlx_register(registry):
        registry.offer(slot, name, factory, **declared)

    return SimpleNamespace(trlx_register=hookimpl(trlx_register))


def made(base, slot, **members):
    """A plugin that offers an object of a class with these members, as `mine`."""
    kind = type("Mine", (base,), {"name": "mine", **members})
    return offer(slot, "mine", lambda session, options: kind())


def algorithm(**members):
    return made(Algorithm, "algorithm", **members)


class Hooks:
    """A plugin with these hooks."""

    def __init__(self, **hooks):
        for name, function in hooks.items():
            setattr(self, name, hookimpl(function))


def two_stars(*given):
    raise AssertionError("never called")


ALGORITHM = HybridConfig(algorithm=["mine"])
MINE = HybridConfig(engine="vllm", rollout="mine", engine_options=ENGINE)
SCORING = HybridConfig(scoring="mine")

WHEN_MADE = {
    # --- plugins= -----------------------------------------------------------------------------------------------
    "a class for a plugin": ({"plugins": [Hooks]}, ["plugins[0] is the class Hooks", "Hooks()"]),
    "a function for a plugin": (
        {"plugins": [digits]},
        ["plugins[0] is the function digits", "SimpleNamespace(digits=digits)", "hookimpl"],
    ),
    "a plugin without hooks": ({"plugins": [object()]}, ["plugins[0], a object, has no hook", "trlx_register"]),
    "a name for a plugin": ({"plugins": ["vllm"]}, ["plugins[0] is the text 'vllm'", "without being named"]),
    "a plugin without a list": ({"plugins": 3}, ["plugins= takes a list", "got 3"]),
    "a hook that does not exist": (
        {"plugins": [Hooks(trlx_rollout_finish=lambda session: None)]},
        ["'Hooks-0'", "'trlx_rollout_finish', which is no hook", "Did you mean 'trlx_rollout_end'"],
    ),
    "a hook with another argument": (
        {"plugins": [Hooks(trlx_rollout_end=lambda session, trajectory: None)]},
        ["'Hooks-0'", "trlx_rollout_end", "{'trajectory'}", "Mend it there"],
    ),
    "a hook without its marker": (
        {"plugins": [SimpleNamespace(trlx_rollout_end=digits)]},
        ["'SimpleNamespace-0'", "trlx_rollout_end", "@trlx_hybrid.hookimpl"],
    ),
    "a trlx_register that raises": (
        {"plugins": [Hooks(trlx_register=lambda registry: registry.nothing)]},
        ["'Hooks-0'", "failed in trlx_register: AttributeError", "Mend it there"],
    ),
    "a trlx_configure that raises": (
        {"plugins": [Hooks(trlx_configure=lambda session: 1 / 0)], "model": None},
        ["'Hooks-0'", "failed in trlx_configure: ZeroDivisionError", "Mend it there"],
    ),
    "two plugins with advantages": (
        {"plugins": [Hooks(trlx_advantages=lambda batch: None), Hooks(trlx_advantages=lambda batch: 0)], "model": None},
        ["'Hooks-0'", "'Hooks-1'", "trlx_advantages", "TRLX_HYBRID_DISABLE=Hooks-1"],
    ),
    # --- what is offered ----------------------------------------------------------------------------------------
    "an unknown slot": (
        {"plugins": [offer("algoritm", "mine", two_stars)]},
        ["'SimpleNamespace-0' (this script", "slot 'algoritm'", "Did you mean 'algorithm'"],
    ),
    "a factory with one argument": (
        {"plugins": [offer("algorithm", "mine", lambda session: None)]},
        ["'SimpleNamespace-0'", "algorithm 'mine'", "a factory that takes (session)", "lambda session, options"],
    ),
    "an object for a factory": (
        {"plugins": [offer("algorithm", "mine", Hooks())]},
        ["'SimpleNamespace-0'", "algorithm 'mine'", "a factory that is a Hooks", "lambda session, options"],
    ),
    "something else is declared": (
        {"plugins": [offer("algorithm", "mine", two_stars, priority=3)]},
        ["'SimpleNamespace-0'", "failed in trlx_register", "'priority'"],
    ),
    "two plugins offer one name": (
        {"plugins": [algorithm(), algorithm()]},
        ["'SimpleNamespace-0' and 'SimpleNamespace-1' both offer algorithm 'mine'", "TRLX_HYBRID_DISABLE="],
    ),
    "a factory that raises": (
        {"plugins": [offer("algorithm", "mine", lambda s, o: {}["x"])], "hybrid": ALGORITHM, "model": None},
        [
            "algorithm 'mine' (plugin 'SimpleNamespace-0'",
            "failed in `factory`: KeyError: 'x'",
            "Mend it in this script",
        ],
    ),
    "a factory that returns nothing": (
        {"plugins": [offer("algorithm", "mine", lambda s, o: None)], "hybrid": ALGORITHM, "model": None},
        ["algorithm 'mine' (plugin 'SimpleNamespace-0'", "made a NoneType without", "protocols.Algorithm"],
    ),
    # --- algorithms ---------------------------------------------------------------------------------------------
    "an algorithm with a misspelt method": (
        {"plugins": [algorithm(advantage=lambda self, groups: groups.totals)], "hybrid": ALGORITHM, "model": None},
        ["algorithm 'mine' (plugin 'SimpleNamespace-0'", "'advantage', which nothing reads", "Call it 'advantages'"],
    ),
    "an algorithm with a misspelt number": (
        {"plugins": [algorithm(round=3)], "hybrid": ALGORITHM, "model": None},
        ["algorithm 'mine'", "'round', which nothing reads", "Call it 'rounds'"],
    ),
    "an algorithm without a method": (
        {"plugins": [algorithm()], "hybrid": ALGORITHM, "model": None},
        ["algorithm 'mine'", "would change nothing", "none of draw, keep, observe, rewards, advantages, loss"],
    ),
    "an algorithm's method without its argument": (
        {"plugins": [algorithm(advantages=lambda self: None)], "hybrid": ALGORITHM, "model": None},
        ["algorithm 'mine'", "advantages()", "called as advantages(groups)"],
    ),
    "a number of rounds that is none": (
        {"plugins": [algorithm(rounds="two")], "hybrid": ALGORITHM, "model": None},
        ["algorithm 'mine'", "rounds='two'", "1 or more"],
    ),
    "an algorithm's name misspelt": (
        {"plugins": [algorithm()], "hybrid": HybridConfig(algorithm=["min"])},
        ["No plugin offers algorithm 'min'", "Did you mean 'mine'"],
    ),
    "options of an algorithm that has none": (
        {
            "plugins": [algorithm()],
            "hybrid": HybridConfig(algorithm=["mine"], algorithm_options={"mine": {"x": 1}}),
        },
        ["algorithm_options", "'mine' has no setting 'x'"],
    ),
    # --- other components ---------------------------------------------------------------------------------------
    "an `unavailable` that raises": (
        {"plugins": [offer("scoring", "mine", two_stars, unavailable=lambda: {}["cuda"])], "hybrid": SCORING},
        ["scoring 'mine' (plugin 'SimpleNamespace-0'", "failed in `unavailable`: KeyError: 'cuda'", "Mend it in this"],
    ),
    "an `unavailable` that takes the machine": (
        {"plugins": [offer("scoring", "mine", two_stars, unavailable=lambda machine: None)], "hybrid": SCORING},
        ["scoring 'mine'", "failed in `unavailable`: TypeError", "'machine'", "Mend it in this script"],
    ),
    "an `unavailable` that says False": (
        {"plugins": [offer("scoring", "mine", two_stars, unavailable=lambda: False)], "hybrid": SCORING},
        ["scoring 'mine'", "returned False from `unavailable`", "None or a text", "Mend it in this script"],
    ),
    "a `refuses` that raises": (
        {
            "plugins": [offer("scoring", "mine", two_stars, refuses=lambda session, options: options.experts)],
            "hybrid": SCORING,
            "model": None,
        },
        ["scoring 'mine'", "failed in `refuses`: AttributeError", "'experts'", "Mend it in this script"],
    ),
    "a `refuses` without the options": (
        {
            "plugins": [offer("scoring", "mine", two_stars, refuses=lambda session: None)],
            "hybrid": SCORING,
            "model": None,
        },
        ["scoring 'mine'", "failed in `refuses`: TypeError", "positional argument", "Mend it in this script"],
    ),
    "a `refuses` that says True": (
        {
            "plugins": [offer("scoring", "mine", two_stars, refuses=lambda session, options: True)],
            "hybrid": SCORING,
            "model": None,
        },
        ["scoring 'mine'", "returned True from `refuses`", "None or a text", "Mend it in this script"],
    ),
    "an environment with both functions": (
        {
            "plugins": [
                offer(
                    "environment",
                    "mine",
                    lambda s, o: EnvironmentArguments(rollout_func=print, environment_factory=dict),
                )
            ],
            "hybrid": HybridConfig(engine="vllm", environment="mine"),
        },
        ["EnvironmentArguments takes either rollout_func or environment_factory"],
    ),
    "an environment whose dataset raises": (
        {
            "plugins": [
                offer(
                    "environment",
                    "mine",
                    lambda s, o: EnvironmentArguments(
                        environment_factory=dict, train_dataset=Path("/nowhere").read_text
                    ),
                )
            ],
            "hybrid": HybridConfig(engine="vllm", environment="mine"),
            "train_dataset": None,
        },
        ["environment 'mine' (plugin 'SimpleNamespace-0'", "failed in `train_dataset`: FileNotFoundError", "/nowhere"],
    ),
    # --- what a user chooses ------------------------------------------------------------------------------------
    "an engine for the trainer": (
        {"engine": "vllm"},
        ["GRPOTrainer takes no argument 'engine'", "hybrid=HybridConfig(engine='vllm')"],
    ),
    "hybrid misspelt": ({"hybird": {}}, ["takes no argument 'hybird'", "Did you mean 'hybrid'"]),
    "hybrid=True": ({"hybrid": True}, ["hybrid= takes a HybridConfig or a mapping", "got bool"]),
    "a setting misspelt": ({"hybrid": {"engin": "vllm"}}, ["'engin'", "Did you mean 'engine'"]),
    "an engine misspelt": ({"hybrid": HybridConfig(engine="vlm")}, ["engine 'vlm'", "Did you mean 'vllm'", "Offered"]),
    "an environment that nobody offers": (
        {"hybrid": HybridConfig(engine="vllm", environment="game")},
        ["environment 'game'", "Offered: none", "trlx-hybrid new NAME --kind environment"],
    ),
    "an engine's option misspelt": (
        {"hybrid": HybridConfig(engine="vllm", engine_options={"max_model_length": 64})},
        ["engine 'vllm'", "'max_model_length'", "Did you mean 'max_model_len'"],
    ),
    "options of a plugin that is not loaded": (
        {"hybrid": HybridConfig(plugin_options={"trajectoris": {"x": 1}}), "model": None},
        ["'trajectoris'", "Did you mean 'trajectories'"],
    ),
    "a rollout without an engine": (
        {"hybrid": HybridConfig(rollout="multi_turn")},
        ["HybridConfig.rollout is set", "HybridConfig(engine='vllm')"],
    ),
    "a plugin to disable that is not there": (
        {"hybrid": HybridConfig(disable_plugins=["vlm"])},
        ["disable_plugins has 'vlm'", "Did you mean 'vllm'"],
    ),
    "server mode with an engine": (
        {"hybrid": HybridConfig(engine="vllm"), "use_vllm": True, "vllm_mode": "server"},
        ["HybridConfig.engine='vllm' contradicts vllm_mode='server'", "Set vllm_mode='colocate'"],
    ),
    # --- rewards and rows ---------------------------------------------------------------------------------------
    "a reward without **kwargs": (
        {"hybrid": MINE, "plugins": [made(Rollout, "rollout")], "reward_funcs": lambda completions: [0.0]},
        ["Reward function '<lambda>'", "does not take prompts, completion_ids", "add **kwargs"],
    ),
    "a reward of a column that is not there": (
        {"hybrid": MINE, "plugins": [made(Rollout, "rollout")], "reward_funcs": lambda answer, **given: [0.0]},
        ["Reward function '<lambda>'", "takes answer, and the dataset has no such column"],
    ),
    "a prompt that is None": (
        {
            "hybrid": MINE,
            "plugins": [made(Rollout, "rollout")],
            "train_dataset": Dataset.from_dict({"prompt": ["1", None]}),
        },
        ["Row 1 of train_dataset has the prompt None", "filter("],
    ),
    "a conversation without messages": (
        {
            "hybrid": MINE,
            "plugins": [made(Rollout, "rollout")],
            "train_dataset": Dataset.from_dict({"prompt": [[{"role": "user", "content": "x"}], []]}),
        },
        ["Row 1 of train_dataset has an empty list as its prompt", "filter("],
    ),
}


def trainer_of(folder, **given):
    """A trainer that generates as TRL does, unless it is told otherwise."""
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "use_vllm": False}
    of_config = {"use_vllm", "vllm_mode", "per_device_train_batch_size", "gradient_accumulation_steps"}
    settings |= {name: given.pop(name) for name in of_config & given.keys()}
    arguments = {"model": NO_MODEL, "reward_funcs": digits, "train_dataset": PROMPTS} | given
    arguments.setdefault("processing_class", character_tokenizer())
    if arguments["model"] is None:
        arguments["model"] = tiny_model()
    return GRPOTrainer(**arguments, args=GRPOConfig(**tiny_grpo(folder, **settings)))


def told(error):
    """A message with its notes, as a traceback ends with them."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("mistake", WHEN_MADE)
def test_a_mistake_is_named_when_the_trainer_is_made(mistake, tmp_path):
    given, words = WHEN_MADE[mistake]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is the matter
        trainer_of(tmp_path, **given)
    missing = [word for word in words if word not in told(caught.value)]
    assert not missing, told(caught.value)


def test_a_setting_of_the_config_that_is_none():
    with pytest.raises(ValueError, match=r"HybridConfig has no setting 'engin'. Did you mean 'engine'"):
        HybridConfig(engin="vllm")
    with pytest.raises(ValueError, match=r"takes its settings by name, as engine='vllm'; got 'vllm'"):
        HybridConfig("vllm")


def test_an_algorithm_that_acts_under_a_name_of_its_own_is_taken(tmp_path):
    """Its helpers may have any names but those that are almost a method's that it lacks."""
    plugin = algorithm(
        rewards=lambda self, groups: self.reward(groups), reward=lambda self, groups: groups.rewards, stats={}
    )
    trainer = trainer_of(tmp_path, plugins=[plugin], hybrid=ALGORITHM, model=None)
    check_algorithm(trainer)
    trainer.session.close()


# --- mistakes that only a run shows ---------------------------------------------------------------------------------

SAID = {}
"""What the plugin of the shared trainer does in this test, in place of what is right."""


def said(name, otherwise):
    return lambda self, *given: SAID[name](*given) if name in SAID else otherwise(self, *given)


def sampled(session, requests, sampling):
    return session.live_engine.generate(requests, sampling)


class Misled:
    """What another component has built, but for methods of which the row says what they do, each under a prefix."""

    def __init__(self, part, prefix=""):
        self.part, self.prefix = part, prefix

    def __getattr__(self, name):
        found = getattr(self.part, name)
        if not callable(found):
            return found
        return lambda *given, **named: SAID.get(f"{self.prefix}{name}", found)(*given, **named)


class MineScoring(Scoring):
    name = "mine"
    balanced = property(lambda self: "micro_batches" in SAID)
    joins = property(lambda self: "joined" in SAID)
    score = said("score", lambda self, rows: rows.padded())
    micro_batches = said("micro_batches", Scoring.micro_batches)
    joined = said("joined", Scoring.joined)
    note = said("scoring_note", Scoring.note)
    close = said("scoring_close", Scoring.close)


class MineAlgorithm(Algorithm):
    name = "mine"
    draw = said("draw", Algorithm.draw)
    keep = said("keep", Algorithm.keep)
    rewards = said("rewards", Algorithm.rewards)
    loss = said("loss", Algorithm.loss)
    advantages = said("advantages", Algorithm.advantages)
    state = said("state", Algorithm.state)


class Hooked:
    """Offers components of each kind that a run asks, and the hooks that rows misuse."""

    @hookimpl
    def trlx_register(self, registry):
        gather = registry.choose("weights", "gather")
        registry.offer("weights", "mine", lambda session, options: Misled(gather.factory(session, options)))
        registry.offer("algorithm", "mine", lambda session, options: MineAlgorithm())
        registry.offer("scoring", "mine", lambda session, options: MineScoring())
        vllm = registry.choose("engine", "vllm")
        made = {"options": vllm.options, "refuses": vllm.refuses, "streams": vllm.streams}
        registry.offer(
            "engine", "mine", lambda session, options: Misled(vllm.factory(session, options), "engine_"), **made
        )
        members = {
            "run": said("run", lambda self, *given: sampled(*given)),
            "close": said("rollout_close", Rollout.close),
        }
        rollout = type("Mine", (Rollout,), {"name": "mine", **members})
        registry.offer("rollout", "mine", lambda session, options: rollout())

    @hookimpl
    def trlx_rollout_end(self, session, trajectories):
        return said("rollout_end", lambda *_: None)(self, session, trajectories)

    @hookimpl
    def trlx_enter_phase(self, session, phase, step):
        return said("enter_phase", lambda *_: None)(self, session, phase)


def reward(completions, **given):
    return said("reward", lambda self, completions: digits(completions))(None, completions)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, started_once):
    """The one trainer with an engine, a step of which takes a tenth of a second."""
    chosen = dict.fromkeys(("engine", "weights", "rollout", "scoring"), "mine")
    hybrid = HybridConfig(**chosen, algorithm=["mine"], engine_options=ENGINE)
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}  # which may be regrouped, or joined
    folder = tmp_path_factory.mktemp("shared")
    trainer = trainer_of(folder, model=None, hybrid=hybrid, plugins=[Hooked()], reward_funcs=reward, **given)
    SAID.clear()
    trainer.train()  # which shows that without a mistake there is no error
    yield trainer
    trainer.session.close()


def changed(**fields):
    """A rollout whose completions have other fields."""
    return lambda *given: [replace(completion, **fields) for completion in sampled(*given)]


OF_ALGORITHM = "algorithm 'mine' (plugin 'Hooked-0', this script"
OF_ROLLOUT = "rollout 'mine' (plugin 'Hooked-0', this script"
OF_SYNC = "weights 'mine' (plugin 'Hooked-0', this script"
OF_SCORING = "scoring 'mine' (plugin 'Hooked-0', this script"
OF_THE_ENGINE = "engine 'mine' (plugin 'Hooked-0', this script"


def broken(*given, **named):
    return {}["x"]


BROKEN = "failed in `{}`: KeyError: 'x'. Mend it in this script"

IN_A_RUN = {
    # --- rollouts -----------------------------------------------------------------------------------------------
    "a rollout without log-probs": (
        {"run": changed(logprobs=None, logprob_token_ids=None)},
        [OF_ROLLOUT, "completion 0 with logprobs=None", "keep those of the engine's completions"],
    ),
    "a rollout with too few log-probs": (
        {"run": changed(logprobs=[[0.0]])},
        [OF_ROLLOUT, "completion 0 with 1 logprobs for 8 tokens", "one list for each token"],
    ),
    "a rollout in another order": (
        {"run": lambda *given: sampled(*given)[::-1]},
        [OF_ROLLOUT, "the completion of request 3 in place 0", "the order of the requests"],
    ),
    "a rollout in another order, of an engine that does not say so": (
        {"run": lambda *given: [replace(c, row=None) for c in sampled(*given)[::-1]]},
        [OF_ROLLOUT, "disagree on what was sampled", "in the order of their requests", "check_rollout"],
    ),
    "a rollout that returns too few": (
        {"run": lambda *given: sampled(*given)[:-1]},
        [OF_ROLLOUT, "a list of 3 for 4 requests", "one Completion for each"],
    ),
    "a rollout that returns token ids": (
        {"run": lambda *given: [c.token_ids for c in sampled(*given)]},
        [OF_ROLLOUT, "a list with a list in it for 4 requests"],
    ),
    "a rollout that returns nothing": ({"run": lambda *given: None}, [OF_ROLLOUT, "a NoneType for 4 requests"]),
    "a rollout with tensors for ids": (
        {"run": changed(token_ids=torch.ones(8))},
        [OF_ROLLOUT, "completion 0 with Tensor as `token_ids`", "a list of int"],
    ),
    "a rollout that raises": (
        {"run": lambda *given: [][0]},
        [OF_ROLLOUT, "failed in `run`: IndexError", "Mend it in this script"],
    ),
    # --- weight syncs -------------------------------------------------------------------------------------------
    "a sync that does nothing": (
        {"sync": lambda: LoadReport(tensors=0, bytes=0)},
        [OF_SYNC, "has brought no weights", "engine.load_weights"],
    ),
    "a sync that returns nothing": ({"sync": lambda: None}, [OF_SYNC, "returned a NoneType from `sync`", "LoadReport"]),
    "a sync that raises": ({"sync": lambda: {}["x"]}, [OF_SYNC, "failed in `sync`: KeyError: 'x'", "Mend it"]),
    "a check that raises": ({"check": broken}, [OF_SYNC, BROKEN.format("check")]),
    "a check without its argument": (
        {"check": lambda: 1},
        [OF_SYNC, "failed in `check`: TypeError", "Mend it in this"],
    ),
    "a check that says False": (
        {"check": lambda full: False},
        [OF_SYNC, "returned False from `check`", "the number of tensors that were compared"],
    ),
    "a put_back that raises": ({"put_back": broken}, [OF_SYNC, BROKEN.format("put_back")]),
    "a put_back that says nothing": (
        {"put_back": lambda: None},
        [OF_SYNC, "returned None from `put_back`", "a bool, whether the engine lost weights"],
    ),
    # --- engines ------------------------------------------------------------------------------------------------
    "an engine that cannot wake": ({"engine_wake": broken}, [OF_THE_ENGINE, BROKEN.format("wake")]),
    "an engine that cannot sleep": ({"engine_sleep": broken}, [OF_THE_ENGINE, BROKEN.format("sleep")]),
    "an engine that cannot load": ({"engine_load_weights": broken}, [OF_THE_ENGINE, BROKEN.format("load_weights")]),
    "an engine that cannot compare": ({"engine_differing": broken}, [OF_THE_ENGINE, BROKEN.format("differing")]),
    "an engine that compares and says nothing": (
        {"engine_differing": lambda weights: None},
        [OF_THE_ENGINE, "returned a NoneType from `differing`", "a list of names"],
    ),
    "an engine that does not know what it holds": (
        {"engine_resident": broken},
        [OF_THE_ENGINE, BROKEN.format("resident")],
    ),
    "an engine that holds bytes": (
        {"engine_resident": lambda what: [3]},
        [OF_THE_ENGINE, "returned [3] from `resident`", "a list of tensors"],
    ),
    # --- scorings -----------------------------------------------------------------------------------------------
    "a scoring that raises": ({"score": broken}, [OF_SCORING, BROKEN.format("score")]),
    "a scoring whose forward pass fails": (
        {"score": lambda rows: rows.forward(torch.ones(1, 3, dtype=torch.int64), input_ids="x")},
        [f"Raised in what the {OF_SCORING}", "called in its `score`"],
    ),
    "a scoring that returns nothing": ({"score": lambda rows: None}, [OF_SCORING, "a NoneType from `score`", "Scores"]),
    "a scoring that scores prompts as well": (
        {"score": lambda rows: Scores(torch.zeros(rows.input_ids.shape), None, None)},
        [OF_SCORING, "log_probs of shape (4, ", "a tensor of shape (4, 8)"],
    ),
    "a scoring without entropies": (
        {"score": lambda rows: rows.padded()._replace(entropies=None)},
        [OF_SCORING, "entropies of type NoneType from `score`", "a tensor of shape (2, 8)"],
    ),
    "joined passes that raise": ({"joined": broken}, [OF_SCORING, BROKEN.format("joined")]),
    "joined passes of no micro-batch": (
        {"joined": lambda tokens: None},
        [OF_SCORING, "returned None from `joined`", "1 or more"],
    ),
    # --- algorithms ---------------------------------------------------------------------------------------------
    "advantages of another shape": (
        {"advantages": lambda groups: groups.totals.mean(1)},
        [OF_ALGORITHM, "a tensor of shape (2,) from `advantages`", "of shape (2, 2)"],
    ),
    "advantages that are NaN": (
        {"advantages": lambda groups: groups.totals * float("nan")},
        [OF_ALGORITHM, "nan at (0, 0) from `advantages`", "finite numbers"],
    ),
    "rewards in the shape of totals": (
        {"rewards": lambda groups: groups.totals},
        [OF_ALGORITHM, "a tensor of shape (2, 2) from `rewards`", "of shape (2, 2, 1)"],
    ),
    "an algorithm that raises": (
        {"advantages": lambda groups: groups.total},
        [OF_ALGORITHM, "failed in `advantages`: AttributeError", "Mend it in this script"],
    ),
    "groups kept as a tensor": (
        {"keep": lambda groups: groups.totals.std(1) >= 0},
        [OF_ALGORITHM, "tensor(True) from `keep`", "True or False for each group"],
    ),
    "too few groups kept": ({"keep": lambda groups: [True]}, [OF_ALGORITHM, "1 values from `keep`", "2 groups"]),
    "groups kept as a number": ({"keep": lambda groups: 3}, [OF_ALGORITHM, "3 from `keep`", "for each group"]),
    "rows drawn that are not there": (
        {"draw": lambda count, size: [size] * count},
        [OF_ALGORITHM, "[8, 8] from `draw`", "2 row numbers below 8"],
    ),
    "a row drawn as a number": ({"draw": lambda count, size: 3}, [OF_ALGORITHM, "3 from `draw`", "2 row numbers"]),
    "a loss of each row": (
        {"loss": lambda scores, batch: batch["advantages"]},
        [OF_ALGORITHM, "a tensor of shape (2,) from `loss`", "a scalar"],
    ),
    # --- hooks --------------------------------------------------------------------------------------------------
    "a hook that raises": (
        {"rollout_end": lambda session, trajectories: 1 / 0},
        ["Plugin 'Hooked-0'", "failed in trlx_rollout_end: ZeroDivisionError", "Mend it there"],
    ),
    "a hook at a phase edge that raises": (
        {"enter_phase": lambda session, phase: session.phases},
        ["Plugin 'Hooked-0'", "failed in trlx_enter_phase: AttributeError", "Mend it there"],
    ),
    "a hook that writes to a trajectory": (
        {"rollout_end": lambda session, trajectories: setattr(trajectories[0], "reward", 1.0)},
        ["Plugin 'Hooked-0'", "failed in trlx_rollout_end: FrozenInstanceError", "'reward'"],
    ),
    "a metric that is a text": (
        {"rollout_end": lambda session, trajectories: session.metrics.update({"hybrid/x": "high"})},
        ["session.metrics['hybrid/x'] is 'high'", "a metric is a number", "Hooked-0"],
    ),
    # --- rewards ------------------------------------------------------------------------------------------------
    "rewards that are texts": (
        {"reward": lambda completions: ["1.0"] * 4},
        ["Reward function 'reward'", "'1.0' (str) for completion 0", "a finite number, or None"],
    ),
    "rewards that are lists": (
        {"reward": lambda completions: [[1.0, 2.0]] * 4},
        ["Reward function 'reward'", "[1.0, 2.0] (list) for completion 0", "a finite number, or None"],
    ),
    "rewards that are tensors of several numbers": (
        {"reward": lambda completions: torch.ones(4, 2)},
        ["Reward function 'reward'", "(Tensor) for completion 0", "a finite number, or None"],
    ),
    "a reward that is NaN": (
        {"reward": lambda completions: [0.0, float("nan"), 0.0, 0.0]},
        ["Reward function 'reward'", "nan for completion 1", "a finite number, or None"],
    ),
    "no rewards": (
        {"reward": lambda completions: None},
        ["Reward function 'reward'", "returned None (NoneType)", "a list with one finite number"],
    ),
    "one reward for all": (
        {"reward": lambda completions: 1.0},
        ["Reward function 'reward'", "returned 1.0", "a list with one finite number"],
    ),
    "rewards by name": (
        {"reward": lambda completions: {"a": 1.0}},
        ["Reward function 'reward'", "(dict)", "a list with one finite number"],
    ),
    "too few rewards": (
        {"reward": lambda completions: [0.0] * 3},
        ["reward function 'reward'", "returned 3 rewards", "4 were expected"],  # TRL's own
    ),
    "a reward that raises": (
        {"reward": lambda completions: {}["answer"]},
        ["'answer'", "Raised by reward function 'reward' for 4 completions"],
    ),
}


@pytest.mark.parametrize("mistake", IN_A_RUN)
def test_a_mistake_is_named_in_a_run(mistake, shared, monkeypatch):
    behaviour, words = IN_A_RUN[mistake]
    shared.session.weights_changed()  # so that each run begins with a sync
    for name, function in behaviour.items():
        monkeypatch.setitem(SAID, name, function)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is the matter
        shared.train()
    missing = [word for word in words if word not in told(caught.value)]
    assert not missing, told(caught.value)


def test_an_error_of_the_policy_is_not_the_engines(shared, monkeypatch):
    """What an engine is given to read fails while it reads."""
    monkeypatch.setattr(shared.session.policy, "_materialise", lambda tensor: 1 / 0)
    shared.session.weights_changed()
    with pytest.raises(ZeroDivisionError) as caught:
        shared.train()
    assert "Raised in what the engine 'mine'" in told(caught.value)
    assert "called in its `load_weights`" in told(caught.value)


BETWEEN_RUNS = {
    "a refuses that raises": ({"refuses": broken}, [OF_SYNC, BROKEN.format("refuses")]),
    "an open that raises": ({"open": broken}, [OF_SYNC, BROKEN.format("open")]),
    "a forget that raises": ({"forget": broken}, [OF_SYNC, BROKEN.format("forget")]),
    "a release that raises": ({"release": broken}, [OF_SYNC, BROKEN.format("release")]),
    "a note that raises": ({"note": broken}, [OF_SYNC, BROKEN.format("note")]),
    "a note that is a number": ({"note": lambda: 3}, [OF_SYNC, "returned 3 from `note`", "None or a text"]),
    "a scoring's note that raises": ({"scoring_note": broken}, [OF_SCORING, BROKEN.format("note")]),
    "an engine that does not close": ({"engine_close": broken}, [OF_THE_ENGINE, BROKEN.format("close")]),
    "a rollout that does not close": ({"rollout_close": broken}, [OF_ROLLOUT, BROKEN.format("close")]),
}


@pytest.mark.parametrize("mistake", BETWEEN_RUNS)
def test_a_mistake_is_named_between_runs(mistake, shared, monkeypatch):
    """What is asked once in the life of an engine; whatever is not closed, the rest is, and the next engine works."""
    session, (behaviour, words) = shared.session, BETWEEN_RUNS[mistake]
    with pytest.raises(Exception) as caught, monkeypatch.context() as patched:  # noqa: PT011, PT012
        for name, function in behaviour.items():
            patched.setitem(SAID, name, function)
        session.weights_changed()
        session.release_engine()
        session.open()
        session.header()
    missing = [word for word in words if word not in told(caught.value)]
    assert not missing, told(caught.value)
    if mistake.endswith("close") or "release" in mistake:
        assert (session.engine, session.weights, session.rollout) == (None, None, None)
    while session._half_closed:  # else its process group would be there in the tests that follow
        session._half_closed.pop().close()
    session.open()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: None, ["returned a NoneType from `state`", "a mapping", "Mend it in this script"]),
        (
            lambda: {"x": torch.ones(1)},
            ["failed in `state`: TypeError: Object of type Tensor", "Mend it in this script"],
        ),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_named(state, words, shared, monkeypatch, tmp_path):
    monkeypatch.setitem(SAID, "state", state)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is the matter
        shared.session.save_state(tmp_path)
    missing = [word for word in [OF_ALGORITHM, *words] if word not in told(caught.value)]
    assert not missing, told(caught.value)


OF_MICRO_BATCHES = {
    "micro-batches that raise": ({"micro_batches": broken}, [OF_SCORING, BROKEN.format("micro_batches")]),
    "micro-batches that are none": (
        {"micro_batches": lambda prompts, tokens, count: None},
        [OF_SCORING, "returned None from `micro_batches`", "2 lists of row numbers"],
    ),
    "micro-batches that leave out a row": (
        {"micro_batches": lambda prompts, tokens, count: [[0, 1], [2, 2]]},
        [OF_SCORING, "put the 4 rows of 2 micro-batches into groups of 2, 2", "each row once"],
    ),
}


@pytest.fixture(scope="module")
def regrouping(tmp_path_factory):
    """A trainer without an engine whose scoring may choose which rows to train together."""
    folder = tmp_path_factory.mktemp("regrouping")
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = trainer_of(folder, model=None, hybrid=SCORING, plugins=[Hooked()], **given)
    yield trainer
    trainer.session.close()


@pytest.mark.parametrize("mistake", OF_MICRO_BATCHES)
def test_a_mistake_in_micro_batches_is_named(mistake, regrouping, monkeypatch):
    behaviour, words = OF_MICRO_BATCHES[mistake]
    monkeypatch.setitem(SAID, "micro_batches", behaviour["micro_batches"])
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is the matter
        regrouping.train()
    missing = [word for word in words if word not in told(caught.value)]
    assert not missing, told(caught.value)


def test_a_scoring_that_does_not_close_is_named(regrouping, monkeypatch):
    monkeypatch.setitem(SAID, "scoring_close", broken)
    regrouping.session.header()  # which asks the scoring
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it says is the matter
        regrouping.session.close()
    assert OF_SCORING in told(caught.value), told(caught.value)
    assert BROKEN.format("close") in told(caught.value)


def test_a_prompt_that_fills_the_context_or_none_of_it(shared, monkeypatch):
    """Through the trainer's own engine: vLLM's errors for them name no row."""
    session = shared.session
    with session.rollout_phase(True):
        for length, words in (
            (64, "Prompt 1 of this batch has 64 tokens"),
            (0, "Prompt 1 of this batch has no tokens"),
        ):
            with pytest.raises(EngineError, match=words):
                session.generate([[5], [5] * length])
        assert len(session.generate([[5] * 63])[0].token_ids) == 1


def test_a_context_shorter_than_the_probe_of_a_weight_sync(started_once):
    run = HybridEngine(tiny_model(), character_tokenizer(), engine_options={"max_model_len": 8}, max_tokens=4)
    with run.rollout_context():
        assert [len(c.token_ids) for c in run.generate([[5] * 7, [5] * 6])] == [1, 2]
    run.close()


class Game:
    """An environment of TRL's whose `reset` does not work."""

    def move(self, direction: str) -> str:
        """
        Go one step.

        Args:
            direction: up or down.
        """
        return direction


class Raising(Game):
    def reset(self, level, **columns):
        return self.levels[level]


class Narrow(Game):
    def reset(self):
        return "begin"


@pytest.mark.parametrize(
    ("environment", "raised"), [(Raising, "no attribute 'levels'"), (Narrow, "unexpected keyword argument 'prompt'")]
)
def test_a_reset_that_fails_names_the_environment_and_the_row(environment, raised, tmp_path):
    tokenizer = chat_tokenizer([])
    message = [{"role": "user", "content": "play"}]
    trainer = trainer_of(
        tmp_path,
        model=tiny_model(vocab_size=len(tokenizer)),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [message] * 8, "level": [3] * 8}),
        environment_factory=environment,
        reward_funcs=lambda completions, **given: [0.0] * len(completions),
    )
    with pytest.raises((AttributeError, TypeError), match=raised) as caught:
        trainer.train()
    assert f"Raised in {environment.__name__}.reset for row 0 of this rank's batch" in told(caught.value)
    assert "'level': 3" in told(caught.value)
    assert "**kwargs for the others" in told(caught.value)
    trainer.session.close()


def test_a_recording_that_cannot_be_written_names_the_file(tmp_path):
    """Unlike trajectories and reports, whose lines a run can do without, a recording with holes is none."""
    recording = Recording(tmp_path)
    recording.begin({}, step=0)
    (tmp_path / "rank0" / "train-000000-0.safetensors" / "taken").mkdir(parents=True)
    batch = RecordedBatch(
        mode="train",
        step=0,
        number=0,
        index=0,
        weight_version=0,
        weights=[],
        tokens_seen=0,
        metrics={},
        values={"prompt_ids": torch.ones(4, 3)},
        rewards=None,
        generators={},
    )
    with pytest.raises(HybridError, match=r"cannot write .*train-000000-0.*Make room") as caught:
        recording.write(batch)
    assert "leave record out" in told(caught.value)
