"""HybridEngine in a plain PyTorch loop: no trainer, the same guarantees."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from safetensors import safe_open
from trlx_hybrid import HybridConfig, HybridEngine, hookimpl
from trlx_hybrid.contract.types import Phase, Sampling
from trlx_hybrid.errors import (
    ComponentError,
    ConfigError,
    EngineError,
    HybridError,
    PluginError,
    StaleWeightsError,
    SyncError,
)
from trlx_hybrid.testing.models import character_tokenizer, tiny_model
from trlx_hybrid_vllm.private.engine import model_of
from vllm import SamplingParams

PROMPTS = [[5, 6, 7, 40], list(range(10, 23)), [90]]
OPTIONS = {"enable_sleep_mode": True, "max_model_len": 64, "max_num_seqs": 16}


class Loop:
    """What a user writes: a model, an optimizer, an engine, REINFORCE on the share of small token ids."""

    def __init__(
        self,
        *,
        weights="auto",
        offload="auto",
        sleep=True,
        model=None,
        max_tokens=8,
        accelerator=None,
        engine_args=None,
        **given,
    ):
        accelerator = accelerator or Accelerator(cpu=True)
        model = model if model is not None else tiny_model()
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        config = HybridConfig(
            engine="vllm",
            weights=weights,
            offload=offload,
            engine_options=OPTIONS | {"enable_sleep_mode": sleep, "engine_args": engine_args or {}},
        )
        self.engine = HybridEngine(
            self.model,
            character_tokenizer(),
            self.optimizer,
            config=config,
            max_tokens=max_tokens,
            accelerator=accelerator,
            **given,
        )
        self.losses = []

    def sample(self):
        with self.engine.rollout_context():
            return self.engine.generate(PROMPTS, num_generations=4)

    def train(self, completions):
        with self.engine.train_context():
            prompts = [prompt for prompt in PROMPTS for _ in range(4)]
            rewards = torch.tensor([sum(t < 50 for t in c.token_ids) / len(c.token_ids) for c in completions])
            advantages = rewards - rewards.mean()
            scores = [self.scores(p, c.token_ids).sum() for p, c in zip(prompts, completions, strict=True)]
            loss = -(advantages * torch.stack(scores)).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def scores(self, prompt, completion):
        logits = self.model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]

    @torch.no_grad()
    def gap(self, completions):
        """Largest difference between engine and model log-probs, in nats."""
        prompts = [prompt for prompt in PROMPTS for _ in range(4)]
        return max(
            float((torch.tensor([p[0] for p in c.logprobs]) - self.scores(prompt, c.token_ids)).abs().max())
            for prompt, c in zip(prompts, completions, strict=True)
        )

    def step(self):
        completions = self.sample()
        self.train(completions)
        return completions


@pytest.fixture
def loop(started_once):
    loops = []

    def start(**given):
        loops.append(Loop(**given))
        return loops[-1]

    yield start
    for each in loops:
        each.engine.close()


def tokens(completions):
    return [c.token_ids for c in completions]


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "sleep"), [("alias", False), ("alias", True), ("copy", True), ("gather", True)])
def test_the_engine_follows_a_plain_pytorch_loop(loop, weights, sleep):
    run = loop(weights=weights, sleep=sleep)
    start = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for _ in range(4):
        completions = run.sample()
        assert run.gap(completions) < 1e-5
        run.train(completions)
    assert all(not torch.equal(p, start[name]) for name, p in run.model.named_parameters())


@pytest.mark.parametrize("weights", ["alias", "copy", "gather"])
def test_a_prompt_that_the_engine_has_cached_is_computed_again_after_a_step(loop, weights):
    run = loop(weights=weights, sleep=False, engine_args={"block_size": 32, "enable_prefix_caching": True})
    prompt = list(range(4, 44))
    for _ in range(3):
        with run.engine.rollout_context():
            (completion,) = run.engine.generate([prompt])
        with run.engine.train_context():
            scores = run.scores(prompt, completion.token_ids)
            assert torch.tensor([p[0] for p in completion.logprobs]) == pytest.approx(scores.detach(), abs=1e-4)
            scores.sum().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()


def test_the_listeners_hear_each_rollout_once(loop):
    run, plans, reports = loop(), [], []
    assert run.engine.on_reshard_start(plans.append) == plans.append

    @run.engine.on_reshard_end
    def heard(report):
        assert len(plans) == len(reports) + 1
        reports.append(report)

    for _ in range(3):
        with run.engine.rollout_context():
            first = run.engine.generate(PROMPTS, num_generations=4)
            run.engine.generate(PROMPTS)
        run.train(first)
    assert [plan.version for plan in plans] == [report.version for report in reports] == [0, 1, 2]
    assert {plan.weights for plan in plans} == {report.weights for report in reports} == {"alias"}
    assert reports[0].logprob_gap < 1e-5
    assert all(report.bytes == 0 and report.verified > 0 for report in reports)


def test_listeners_that_take_nothing_hear_the_same(loop):
    run, heard = loop(), []

    @run.engine.on_reshard_start
    def started():
        heard.append("start")

    @run.engine.on_reshard_end
    def ended():
        heard.append("end")

    run.engine.on_reshard_end(lambda report=None: heard.append(report.version))
    for _ in range(2):
        run.step()
    assert heard == ["start", "end", 0, "start", "end", 1]


def test_a_rollout_with_unchanged_weights_syncs_nothing_and_draws_anew(loop):
    run, reports = loop(), []
    run.engine.on_reshard_end(reports.append)
    assert tokens(run.sample()) != tokens(run.sample())
    assert len(reports) == 1


def test_the_engine_leaves_trl_alone():
    code = "import sys; from trlx_hybrid import HybridEngine; print('torch' in sys.modules, 'trl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


def test_the_header_counts_this_optimizer(loop, capfd):
    run = loop(offload="all")
    run.sample()
    header = capfd.readouterr().err
    assert "weights=alias (auto)" in header
    assert run.engine.session.memory.prediction.phases["train"]["optimizer"] == 2 * sum(
        p.nbytes for p in run.model.parameters()
    )


def test_the_weight_path_of_the_documentation_serves_a_loop():
    page = (Path(__file__).parents[3] / "docs" / "hybrid-engine.md").read_text()
    path = ModuleType("halved")
    exec(
        next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HalvedSync" in block),
        vars(path),
    )
    reports = []
    for dtype in ("bfloat16", "float32"):
        model = tiny_model()
        settings = OPTIONS | {"dtype": dtype}
        config = HybridConfig(engine="vllm", weights="halved", engine_options=settings)
        engine = HybridEngine(model, character_tokenizer(), max_tokens=8, config=config, plugins=[path])
        engine.on_reshard_end(reports.append)
        with engine:
            if dtype == "float32":
                with (
                    pytest.raises(ComponentError, match=r"the policy is in torch\.float32 already"),
                    engine.rollout_context(),
                ):
                    pass
                continue
            for _ in range(2):
                with engine.rollout_context():
                    engine.generate(PROMPTS)
                with engine.train_context(), torch.no_grad():
                    model.lm_head.weight.mul_(1.5)
    assert [report.weights for report in reports] == ["halved", "halved"]
    assert {report.bytes for report in reports} == {sum(p.numel() for p in model.parameters()) * 2}
    assert all(report.verified for report in reports)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_training_inside_a_rollout_is_refused(loop):
    run = loop()
    with run.engine.rollout_context():
        with pytest.raises(StaleWeightsError, match="leave the rollout before training"), run.engine.train_context():
            pass
        with pytest.raises(StaleWeightsError, match="leave the rollout before saving"):
            run.engine.state_dict()
        assert len(run.engine.generate(PROMPTS)) == 3
    run.step()


def test_a_rollout_inside_a_rollout_is_refused(loop):
    run = loop()
    with run.engine.rollout_context():
        with pytest.raises(StaleWeightsError, match="cannot be nested"), run.engine.rollout_context():
            pass
        assert len(run.engine.generate(PROMPTS)) == 3
    run.step()


def test_closing_inside_a_rollout_and_sampling_after_the_end_are_refused(loop):
    run = loop()
    with run.engine.rollout_context():
        with pytest.raises(StaleWeightsError, match="leave the rollout before closing"):
            run.engine.close()
        assert len(run.engine.generate(PROMPTS)) == 3
    run.engine.close()
    with pytest.raises(EngineError, match="was closed"), run.engine.rollout_context():
        pass


def test_a_listener_that_fails_is_named_and_the_engine_goes_on(loop):
    run = loop()

    @run.engine.on_reshard_end
    def impatient(report):
        if report.version == 1:
            raise ValueError("too slow")

    run.step()
    with pytest.raises(HybridError, match=r"impatient, called on_reshard_end, raised ValueError: too slow"):
        run.sample()
    run.engine.session.weights_changed()
    completions = run.sample()
    assert run.gap(completions) < 1e-5
    run.train(completions)


class FailingAtEdges:
    """Each of its hooks fails once for each phase, and those of the sync between the engine's two wake-ups once."""

    def __init__(self):
        self.failed = []

    @hookimpl
    def trlx_enter_phase(self, phase):
        self.once(("enter", phase))

    @hookimpl
    def trlx_leave_phase(self, phase):
        self.once(("leave", phase))

    @hookimpl
    def trlx_sync_start(self):
        self.once("sync starts")

    @hookimpl
    def trlx_sync_end(self):
        self.once("sync ends")

    def once(self, edge):
        if edge not in self.failed:
            self.failed.append(edge)
            raise RuntimeError("once")


def test_a_hook_that_fails_at_a_phase_edge_leaves_the_memory_to_training(loop):
    plugin = FailingAtEdges()
    run = loop(plugins=[plugin], weights="gather")
    session, asleep = run.engine.session, set()
    for count in range(1, 7):
        with pytest.raises(PluginError, match="RuntimeError: once"):
            run.sample()
        assert len(plugin.failed) == count
        assert session.phase is Phase.TRAIN
        engine = session.live_engine
        assert engine.asleep == {"weights", "kv_cache"}
        assert not any(t.untyped_storage().nbytes() for t in model_of(engine.llm).parameters())
        asleep.add(engine.asleep_bytes)
    assert len(asleep) == 1
    assert run.gap(run.sample()) < 1e-5


def test_generating_outside_of_a_rollout_is_refused(loop):
    run = loop()
    for _ in range(2):  # before the engine exists, and while it sleeps
        with pytest.raises(StaleWeightsError, match=r"generate\(\) outside of rollout_context\(\)"):
            run.engine.generate(PROMPTS)
        run.step()


def test_generating_after_a_step_inside_the_rollout_is_refused(loop):
    run = loop()
    with run.engine.rollout_context():
        run.engine.session.weights_changed()
        with pytest.raises(StaleWeightsError, match="The engine holds weight version 0, the policy is at 1"):
            run.engine.generate(PROMPTS)
    assert run.gap(run.sample()) < 1e-5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 4, "sampling": Sampling(max_tokens=4)}, "either sampling=.* or max_tokens=, not both"),
        ({"max_tokens": 4, "config": HybridConfig(engine="vllm"), "engine_options": {}}, "only without config="),
        ({"max_tokens": 4, "config": HybridConfig(engine="transformers")}, "needs an engine other than 'transformers'"),
        ({"max_tokens": 4, "engine_options": {"max_len": 3}}, "has no setting 'max_len'. Did you mean 'max_model_len'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        HybridEngine(tiny_model(), character_tokenizer(), **given)


RESHARD = {"enable_reshard": True, "compress_reshard": True, "compression_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": HybridConfig(weights="copy")}, r"enable_reshard=True contradicts HybridConfig.weights='copy'"),
        (
            {"config": HybridConfig(weights="reshard"), "enable_reshard": False},
            r"enable_reshard=False contradicts HybridConfig.weights='reshard'",
        ),
        ({"enable_reshard": None}, "say what a reshard sends: add enable_reshard=True"),
        ({"compress_reshard": None}, "compress_reshard=True and compression_dtype= belong together"),
        ({"compress_reshard": False}, "belong together"),
        ({"compression_dtype": None}, "belong together"),
        ({"compression_dtype": torch.float64}, "torch.float64 compresses nothing: the model is in torch.float32"),
        ({"compression_dtype": torch.float8_e4m3fn}, "computes in no dtype 'float8_e4m3fn'"),
        ({"engine_options": {"dtype": "float32"}}, "sends torch.bfloat16, which .* its options say dtype='float32'"),
        (
            {"engine_options": {"dtype": "bfloat16"}, "compress_reshard": False, "compression_dtype": None},
            "compress_reshard=False sends torch.float32, which .* its options say dtype='bfloat16'",
        ),
    ],
)
def test_what_a_reshard_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        HybridEngine(tiny_model(), character_tokenizer(), **RESHARD | given)


def test_a_reshard_without_a_plugin_for_it_is_refused():
    config = HybridConfig(disable_plugins=["reshard"])
    with pytest.raises(ComponentError, match=r"needs a weight path that reshards: .*install trlx-hybrid-reshard"):
        HybridEngine(tiny_model(), character_tokenizer(), config=config, enable_reshard=True)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(RESHARD, "bfloat16"), (RESHARD | {"compress_reshard": False, "compression_dtype": None}, "float32")],
)
def test_a_reshard_sends_what_the_engine_computes_in(given, dtype):
    with HybridEngine(tiny_model(), character_tokenizer(), **given) as engine:
        selection = engine.session.selection
        assert selection.engine.options.dtype == dtype
        assert selection.weights.component.name == "reshard"


def test_without_reshard_any_other_path_is_taken():
    with HybridEngine(tiny_model(), character_tokenizer(), enable_reshard=False) as engine:
        names = [path.component.name for path in engine.session.selection.weight_paths]
        assert "reshard" not in names
        assert names[-1] == "gather"


def test_a_config_that_names_no_engine_leaves_it_at_vllm():
    with HybridEngine(tiny_model(), character_tokenizer(), max_tokens=4, config=HybridConfig(weights="copy")) as engine:
        assert str(engine.session.selection.engine).startswith("engine=vllm")
        assert engine.session.selection.weights.component.name == "copy"


# --- sleep -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["alias", "gather"])
def test_an_engine_that_sleeps_neither_generates_nor_takes_weights(loop, weights):
    run = loop(weights=weights)
    run.step()
    session = run.engine.session
    engine = session.live_engine
    assert engine.asleep == ({"kv_cache"} if weights == "alias" else {"weights", "kv_cache"})
    with pytest.raises(EngineError, match="asleep or holds no weights"):
        engine.generate([], session.sampler.sampling)
    with pytest.raises(EngineError, match="asleep or holds no weights"):  # as a script may do outside of a rollout
        engine.llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=4), use_tqdm=False)
    if weights == "gather":
        with pytest.raises(SyncError, match=r"weights are asleep: `engine\.wake"):
            session.weights.sync()
    assert run.gap(run.sample()) < 1e-5


def test_waking_and_sleeping_twice_changes_nothing(loop):
    run = loop(weights="copy")
    run.step()
    engine = run.engine.session.live_engine
    engine.sleep()
    assert engine.asleep == {"weights", "kv_cache"}
    with run.engine.rollout_context():
        expected = run.engine.generate(PROMPTS, num_generations=4)
    again = Loop(weights="copy")
    again.step()
    with again.engine.rollout_context():
        for _ in range(2):
            again.engine.session.live_engine.wake("weights")
            again.engine.session.live_engine.wake("kv_cache")
        found = again.engine.generate(PROMPTS, num_generations=4)
    again.engine.close()
    assert tokens(found) == tokens(expected)


@pytest.mark.parametrize("weights", ["alias", "gather"])
def test_after_a_tool_that_raises_everything_goes_on(loop, weights):
    run, reference = loop(weights=weights, offload="all"), []
    run.step()

    def tool():
        reference.extend(run.engine.generate(PROMPTS, num_generations=4))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), run.engine.rollout_context():
        tool()
    session = run.engine.session
    assert session.phase is Phase.TRAIN
    assert session.live_engine.asleep
    completions = run.sample()
    assert tokens(completions) == tokens(reference)  # what was lost is drawn again
    assert run.gap(completions) < 1e-5
    with pytest.raises(ZeroDivisionError), run.engine.train_context():
        raise ZeroDivisionError
    completions = run.sample()
    assert run.gap(completions) < 1e-5
    run.train(completions)


# --- offloading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["alias", "copy"])
def test_what_leaves_and_returns_changes_no_bit(loop, weights):
    moved, stayed = loop(weights=weights, offload="all"), None
    drawn = [tokens(moved.step()) for _ in range(4)]
    with moved.engine.rollout_context():
        held = moved.engine.session.memory.ledger.measure()
        assert held["optimizer"] == 0
        assert (held["policy"] == 0) == (weights != "alias")
    logged = {name for name in moved.engine.session.metrics if "/memory/moved/" in name}
    owners = {"optimizer", "kv_cache", "policy"} | ({"engine_weights"} if weights != "alias" else set())
    assert logged == {f"hybrid/memory/moved/{owner}_mib" for owner in owners}  # an aliased policy's buffers leave
    moved.engine.close()
    stayed = loop(weights=weights, offload="none")
    assert [tokens(stayed.step()) for _ in range(4)] == drawn
    assert stayed.losses == moved.losses
    for (name, ours), theirs in zip(moved.model.named_parameters(), stayed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for ours, theirs in zip(moved.optimizer.state.values(), stayed.optimizer.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_gradients_that_accumulate_over_a_rollout_survive_it(loop):
    run = loop(weights="copy", offload="all")
    run.step()
    run.model(input_ids=torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    before = {name: p.grad.clone() for name, p in run.model.named_parameters()}
    with run.engine.rollout_context():
        assert run.engine.session.memory.ledger.measure()["gradients"] == 0
    assert all(torch.equal(p.grad, before[name]) for name, p in run.model.named_parameters())


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_accelerate_saves_and_loads_what_is_aliased(loop, tmp_path, tied):
    accelerator = Accelerator(cpu=True)
    run = loop(model=tiny_model(tied=tied), accelerator=accelerator, offload="all")
    run.step()
    assert run.engine.session.weights.name == "alias"
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(run.model, tmp_path / "model")
    run.engine.save_state(tmp_path / "state")
    saved = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for folder in ("state", "model"):
        with safe_open(tmp_path / folder / "model.safetensors", "pt") as file:
            assert set(file.keys()) == set(saved)
        reloaded = tiny_model(tied=tied, seed=1)
        load_checkpoint_in_model(reloaded, str(tmp_path / folder / "model.safetensors"))
        assert all(torch.equal(p, saved[name]) for name, p in reloaded.named_parameters())

    onward = [tokens(run.step()) for _ in range(2)]
    accelerator.load_state(tmp_path / "state")
    run.engine.load_state(tmp_path / "state")
    assert all(torch.equal(p, saved[name]) for name, p in run.model.named_parameters())
    completions = run.sample()
    assert run.gap(completions) < 1e-5
    run.train(completions)
    assert [tokens(completions), tokens(run.step())] == onward


def test_loading_the_version_that_was_just_sampled_from_draws_the_same_again(loop, tmp_path):
    run = loop()
    run.step()
    run.engine.save_state(tmp_path)
    drawn = tokens(run.sample())
    run.engine.load_state(tmp_path)
    assert tokens(run.sample()) == drawn


def test_a_resume_draws_what_the_uninterrupted_loop_drew(loop, tmp_path):
    first = loop()
    for _ in range(2):
        first.step()
    first.engine.session.weights_changed()  # a version more than steps
    first.engine.save_state(tmp_path / "not" / "there" / "yet")
    weights, moments = first.engine.state_dict(), first.optimizer.state_dict()
    torch.save([weights, moments], tmp_path / "loop.pt")
    onward = [tokens(first.step()) for _ in range(2)]
    first.engine.close()

    weights, moments = torch.load(tmp_path / "loop.pt")
    second = loop(model=tiny_model(seed=1))
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(moments)
    second.engine.load_state(tmp_path / "not" / "there" / "yet")
    assert (second.engine.session.step, second.engine.session.weight_version) == (2, 3)
    assert [tokens(second.step()) for _ in range(2)] == onward


def test_the_state_dict_is_a_copy_without_shared_storages(loop, tmp_path):
    run = loop(model=tiny_model(tied=True))
    run.step()
    saved = run.engine.state_dict()
    assert saved.keys() == run.model.state_dict().keys()
    assert len({t.untyped_storage().data_ptr() for t in saved.values()}) == len(saved)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in saved.values())
    before = {name: t.clone() for name, t in saved.items()}
    run.step()
    assert all(torch.equal(saved[name], t) for name, t in before.items())
    torch.save(saved, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 1.2 * sum(t.nbytes for t in saved.values())
    other = tiny_model(tied=True, seed=1)
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())


@pytest.mark.parametrize("weights", ["alias", "copy"])
def test_after_close_the_model_owns_its_weights_and_trains_on(loop, weights):
    run = loop(weights=weights, offload="all")
    completions = run.step()
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.engine.close()
    run.engine.close()
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    assert all(p.untyped_storage().resizable() for p in run.model.parameters())
    run.train(completions)
    assert len(run.losses) == 2
