"""The checks that authors of plugins run: our own components pass them, and each usual mistake is named."""

import asyncio
import dataclasses
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from trlx_hybrid import hookimpl
from trlx_hybrid.contract.protocols import Algorithm, Rollout, Scores, Scoring
from trlx_hybrid.contract.types import LoadReport
from trlx_hybrid.plugins.builtin import GatherSync
from trlx_hybrid.testing.chat import chat_tokenizer
from trlx_hybrid.testing.conformance import (
    ConformanceError,
    check_advantages,
    check_algorithm,
    check_engine,
    check_environment,
    check_imports,
    check_rollout,
    check_scoring,
    check_template,
    check_weights,
)

ROOT = Path(__file__).parents[1]
OPTIONS = {"max_model_len": 128, "max_num_seqs": 16, "enable_sleep_mode": True}


@pytest.fixture(autouse=True)
def _started_once(started_once):
    pass


def test_our_engine_passes():
    check_engine("vllm", OPTIONS)


@pytest.mark.parametrize("name", ["alias", "copy", "gather", "reshard"])
def test_our_weight_syncs_pass(name):
    check_weights(name, engine_options=OPTIONS)


@pytest.mark.parametrize("name", ["lora", "merged"])
def test_our_weight_syncs_of_adapters_pass(name, tiny_model):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny_model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    check_weights(name, engine_options=OPTIONS, model=adapted)


@pytest.mark.parametrize("name", ["single_turn", "multi_turn"])
def test_our_rollouts_pass(name):
    check_rollout(name, engine_options=OPTIONS)


class Passing:
    """Stands before a component that is right, and hands everything on to it."""

    def __init__(self, component):
        self._component = component

    def __getattr__(self, name):
        return getattr(self._component, name)


def broken(slot, original, kind, name="broken"):
    """A plugin that offers `kind` around one of our components."""

    @hookimpl
    def trlx_register(registry):
        component = registry.choose(slot, original)
        declared = {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}
        for given in ("slot", "name", "factory", "plugin", "distribution"):
            del declared[given]
        factory = component.factory

        def build(session, options):
            made = kind(factory(session, options))
            made.policy = session.policy
            return made

        registry.offer(slot, name, build, **declared)

    return SimpleNamespace(trlx_register=trlx_register)


class Shifted(Passing):
    def generate(self, requests, sampling):
        return [
            dataclasses.replace(c, logprobs=c.logprobs and [*c.logprobs[1:], c.logprobs[-1]])
            for c in self._component.generate(requests, sampling)
        ]


class Following(Passing):
    """A copy that computes with the policy."""

    def generate(self, requests, sampling):
        self._component.load_weights(self.policy.full_weights())
        return self._component.generate(requests, sampling)


class AsTheyFinish(Passing):
    def generate(self, requests, sampling):
        return self._component.generate(requests, sampling)[::-1]


class Remembering(Passing):
    """Whose prefix cache outlives the weights."""

    def __init__(self, component):
        super().__init__(component)
        self._known = {}

    def generate(self, requests, sampling):
        key = repr((requests, sampling))
        if key not in self._known:
            self._known[key] = self._component.generate(requests, sampling)
        return self._known[key]


class StaleAfterWaking(Passing):
    """Which believes, once it has slept, that its weights came back with it."""

    slept = False

    def sleep(self, keep_weights=False):
        self.slept = True
        self._component.sleep(keep_weights=True)

    def load_weights(self, weights):
        if not self.slept:
            return self._component.load_weights(weights)
        return LoadReport(tensors=sum(1 for _ in weights), bytes=0)

    def differing(self, weights):
        return [] if self.slept else self._component.differing(weights)


class SeededByPlace(Passing):
    def generate(self, requests, sampling):
        requests = [dataclasses.replace(request, seed=place) for place, request in enumerate(requests)]
        return self._component.generate(requests, sampling)


class LosingAll(Passing):
    """Whose policy may live in the memory that it gives back."""

    def sleep(self, keep_weights=False):
        self._component.sleep(keep_weights=False)


class OneRank(Passing):
    def generate(self, requests, sampling):
        if sampling.logprobs:
            sampling = dataclasses.replace(sampling, logprobs=0)
        return self._component.generate(requests, sampling)


class AlwaysStopped(Passing):
    def generate(self, requests, sampling):
        found = self._component.generate(requests, sampling)
        return [dataclasses.replace(completion, finish_reason="stop") for completion in found]


class Holding(Passing):
    """Which forgets to say what it holds."""

    def resident(self, what):
        return []


class Agreeing(Passing):
    def differing(self, weights):
        for _ in weights:
            pass
        return []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Shifted, r"They fit when moved by one token: logprobs\[i\] belongs to token_ids\[i\]"),
        (Following, r"it sampled from them before it was given them\. .* must not inherit `forward`"),
        (AsTheyFinish, r"They fit the prompt of request \d: completions belong in the order of the requests"),
        (Remembering, r"those of the weights before the last change: .* drop every cache"),
        (StaleAfterWaking, r"those of the weights before the last change: load the new ones, also after waking up"),
        (SeededByPlace, r"Draw with a generator of each request's own, seeded with Request\.seed"),
        (LosingAll, r"`sleep\(keep_weights=True\)` lost weights"),
        (OneRank, r"with Sampling\.logprobs=2 it returned"),
        (AlwaysStopped, r"finish_reason='stop'.*say which it was: 'length' here"),
        (Holding, r"asleep it holds 0 bytes of 0"),
        (Agreeing, r"was given \S+ with one element changed, and returned \[\]"),
    ],
)
def test_an_engines_mistake_is_named(kind, message):
    with pytest.raises(ConformanceError, match=message):
        check_engine("broken", OPTIONS, plugins=[broken("engine", "vllm", kind)])


class OnlyTrained(GatherSync):
    """Which leaves out what is frozen now, also where that was trained a moment ago."""

    def sync(self):
        policy = self._policy
        trained = {name for name, p in policy.base_parameters().items() if p.requires_grad}
        return self._engine.load_weights(policy.full_weights(trained))


def test_a_weight_syncs_mistake_is_named():
    @hookimpl
    def trlx_register(registry):
        def build(session, options):
            return OnlyTrained(session.policy, session.live_engine)

        registry.offer("weights", "trained", build)

    with pytest.raises(ConformanceError, match="after all weights were trained, and frozen but for one"):
        check_weights("trained", engine_options=OPTIONS, plugins=[SimpleNamespace(trlx_register=trlx_register)])


class ShortestFirst(Rollout):
    name = "broken"

    def run(self, session, requests, sampling):
        return session.live_engine.generate(sorted(requests, key=lambda r: len(r.prompt_ids)), sampling)


class Silent(Rollout):
    name, tells = "broken", True

    def run(self, session, requests, sampling):
        return session.live_engine.generate(requests, sampling)


class Failing(Rollout):
    name, tells = "broken", True

    def run(self, session, requests, sampling):
        assert session.on_completion is not None
        self.session = session
        raise RuntimeError("no answer")


class MaskedLate(Passing):
    def converse(self, session, dialogues, limits, request):
        conversations = self._component.converse(session, dialogues, limits, request)
        for conversation in conversations:
            conversation.loss_mask = [1, *conversation.loss_mask[:-1]]
        return conversations


@pytest.mark.parametrize(
    ("original", "kind", "message"),
    [
        ("single_turn", lambda _: ShortestFirst(), "completions belong in the order of the requests"),
        ("single_turn", lambda _: Silent(), r"`on_completion` was called for the rows \[\] of"),
        ("multi_turn", MaskedLate, r"the mask says 1 at token \[\d+\], which was observed.* off by one"),
    ],
)
def test_a_rollouts_mistake_is_named(original, kind, message):
    with pytest.raises(ConformanceError, match=message):
        check_rollout("broken", engine_options=OPTIONS, plugins=[broken("rollout", original, kind)])


def test_a_rollout_that_fails_leaves_nothing_behind_in_its_session():
    failing = Failing()
    with pytest.raises(ConformanceError, match="no answer"):
        check_rollout("broken", engine_options=OPTIONS, plugins=[broken("rollout", "single_turn", lambda _: failing)])
    assert failing.session.on_completion is None


class Count:
    """Right: counts down from the row's number, and ends."""

    def reset(self, row):
        self.left = row["from"]
        return f"count down from {self.left}"

    async def step(self, completion):
        self.left -= 1
        return SimpleNamespace(observation=f"{self.left} {completion}", done=self.left == 0, reward=1.0)


class Unseeded(Count):
    def reset(self, row):
        super().reset(row)
        return f"count down from {random.random()}"


class Shared(Count):
    said: ClassVar[list[int]] = []

    async def step(self, completion):
        step = await super().step(completion)
        self.said.append(self.left)
        if step.done:
            self.said.clear()
        step.observation = str(len(self.said))
        return step


class Endless(Count):
    async def step(self, completion):
        step = await super().step(completion)
        step.done = False
        return step


class Undefined(Count):
    async def step(self, completion):
        step = await super().step(completion)
        step.reward = float("nan")
        return step


class Looped(Count):
    """Right: what `reset` makes belongs to the loop that `step` runs on."""

    async def reset(self, row):
        self.turn = asyncio.get_running_loop().create_future()
        self.turn.set_result(None)
        return super().reset(row)

    async def step(self, completion):
        await self.turn
        return await super().step(completion)


class Bare(Count):
    async def step(self, completion):
        return await super().step(completion), 1.0


def test_an_environments_mistake_is_named():
    rows, answers = [{"from": 3}, {"from": 5}], ["a", "b"]
    check_environment(Count, rows, answers)
    check_environment(Looped, rows, answers)
    with pytest.raises(ConformanceError, match="no rows"):
        check_environment(Count, [], answers)

    class Local(Count):
        pass

    for factory, message in (
        (Local, "cannot be pickled.*Define its class in a module"),
        (Unseeded, "row 0 was played twice with the same answers.*turn 0 showed"),
        (Shared, "went otherwise while other rows were played.*Keep an episode's state in the object"),
        (Endless, "was not done after 100 turns"),
        (Undefined, "gave the reward nan"),
        (Bare, "`step` returned a tuple without observation, done, reward"),
    ):
        with pytest.raises(ConformanceError, match=message):
            check_environment(factory, rows, answers)


class Advantages:
    """By groups, of this rank's rows; `first` takes those of rank 0 on every rank."""

    def __init__(self, first=False, written=False, divided=False, clamped=False):
        self.first, self.written, self.divided, self.clamped = first, written, divided, clamped

    @hookimpl
    def trlx_advantages(self, session, batch):
        if self.clamped:
            return batch["advantages"].clamp(min=-0.25)
        rows = len(batch["advantages"])
        start = 0 if self.first else session.ranks.rank * rows
        groups = batch["rewards_per_func"].nan_to_num().sum(1).view(-1, session.args.num_generations)
        if self.written:
            batch["advantages"] += 1.0
        centred = groups - groups.mean(1, keepdim=True)
        centred = centred / groups.std(1, keepdim=True) if self.divided else centred
        return centred.flatten()[start : start + rows]


class OfThisRank(Advantages):
    """Which takes the rows of a rank for whole groups."""

    @hookimpl
    def trlx_advantages(self, session, batch):
        rows = len(batch["advantages"])
        rewards = batch["rewards_per_func"].nan_to_num().sum(1)[session.ranks.rank * rows :][:rows]
        groups = rewards.view(-1, session.args.num_generations)
        return (groups - groups.mean(1, keepdim=True)).flatten()


def test_an_advantages_mistake_is_named(tiny_trainer):
    for settings, message in (
        ({}, None),
        ({"clamped": True}, None),
        ({"first": True}, "this rank's B begin at session.ranks.rank"),
        ({"written": True}, "it wrote into the batch's advantages"),
        ({"divided": True}, "With rewards that are all alike: .* returned nan for row 0"),
    ):
        trainer = tiny_trainer(plugins=[Advantages(**settings)])
        if message is None:
            check_advantages(trainer)
        else:
            with pytest.raises(ConformanceError, match=message):
                check_advantages(trainer)
    with pytest.raises(ConformanceError, match=r"With a group that lies on two ranks: .*OfThisRank"):
        check_advantages(tiny_trainer(plugins=[OfThisRank()]))
    with pytest.raises(ConformanceError, match="No plugin of this trainer has the hook"):
        check_advantages(tiny_trainer())


class Asked(Algorithm):
    """All alike; broken as a test says."""

    name = "asked"
    mistake = ""

    def __init__(self):
        self.seen = 0

    def draw(self, count, size):
        if self.mistake == "unseeded":
            return random.sample(range(size), count)
        return [(self.seen + i) % size for i in range(count)]

    def observe(self, groups):
        self.seen += len(groups)

    def keep(self, groups):
        return [True] * (len(groups) - (self.mistake == "short"))

    def rewards(self, groups):
        if self.mistake == "written":
            groups.rewards[0] += 1.0
        return groups.rewards

    def advantages(self, groups):
        centred = groups.totals - groups.totals.nanmean(1, keepdim=True)
        return centred / groups.totals.std(1, keepdim=True) if self.mistake == "divided" else centred

    def loss(self, scores, batch):
        kept = torch.ones_like(scores.log_probs) if self.mistake == "unmasked" else batch["completion_mask"]
        if self.mistake != "tools":
            kept = kept * batch.get("tool_mask", 1)
        if self.mistake == "empty":
            return -((scores.log_probs * kept).sum(1) / kept.sum(1)).mean()
        advantages = batch["advantages"]
        if self.mistake == "broadcast" or advantages.ndim == 1:
            advantages = advantages.unsqueeze(1)
        term = -(scores.log_probs * kept * (1 + advantages)).sum() / kept.sum()
        return term.detach() if self.mistake == "detached" else term

    def state(self):
        return {} if self.mistake == "lost" else {"seen": self.seen}

    def load_state(self, state):
        self.seen = state.get("seen", 0) if self.mistake != "unread" else 0


def test_an_algorithms_mistake_is_named(tiny_trainer, monkeypatch):
    offer = SimpleNamespace(trlx_register=hookimpl(lambda registry: registry.offer("algorithm", "asked", made)))

    def made(session, options):
        return Asked()

    trainer = tiny_trainer(hybrid={"algorithm": ["asked"]}, plugins=[offer])
    for mistake, message in (
        ("", None),
        ("unseeded", "a second one answered otherwise. Ranks must answer alike"),
        ("short", "3 values from `keep`, where one for each of 4 groups"),
        ("written", "asked wrote into the groups' rewards. Return a new tensor"),
        ("divided", r"returned nan at \(0, 0\) from `advantages`"),
        ("unmasked", "gradient at tokens that are not trained. Multiply by batch"),
        ("tools", "gradient at tokens that are not trained. Multiply by batch"),
        ("broadcast", "with a row's advantage at each of its tokens, the `loss` is another one. Take both shapes"),
        ("empty", "returned nan from `loss`. A row may have no tokens"),
        ("detached", "returned a `loss` without gradients"),
        ("lost", "taken up from a checkpoint, it answered otherwise"),
        ("unread", "after `load_state`, `state` returned something else. Let `state` return all"),
    ):
        monkeypatch.setattr(Asked, "mistake", mistake)
        if message is None:
            check_algorithm(trainer, per_token=True)
        else:
            with pytest.raises(ConformanceError, match=message):
                check_algorithm(trainer, per_token=True)
    with pytest.raises(ConformanceError, match=r"has no algorithm\. Name one"):
        check_algorithm(tiny_trainer())


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"adaptive_checkpointing": True, "joined": True}], ids=str)
def test_packed_rows_pass(tiny_trainer, options):
    check_scoring(tiny_trainer(hybrid={"scoring": "packed", "scoring_options": options}, temperature=0.7))


def test_padded_rows_pass(tiny_trainer):
    check_scoring(tiny_trainer(hybrid={"scoring": "padded"}, temperature=0.7))


class Alone(Scoring):
    """A pass for each row, without its padding; broken as a test says."""

    name = "alone"
    mistake = ""
    balanced = joins = True

    def __init__(self, session):
        self.temperature, self.config = session.args.temperature, session.policy.base.config

    def score(self, rows):
        if self.mistake == "all at once":
            rows.forward(torch.full_like(rows.input_ids, -100), input_ids=rows.input_ids)
        if self.mistake == "written":
            rows.input_ids.zero_()
        if self.mistake == "unrestored":
            self.config._attn_implementation = "eager"
        scored = [self.row(rows, i) for i in range(len(rows.input_ids))]
        entropies = [one.entropies for one in scored if one.entropies is not None]
        log_probs = torch.cat([one.log_probs for one in scored])
        if self.mistake == "shuffled":
            log_probs = log_probs.flip(0)
        if self.mistake == "undefined":
            log_probs = log_probs.masked_fill(log_probs == 0, float("nan"))
        if self.mistake == "bare":
            return log_probs
        if self.mistake == "cut":
            log_probs = log_probs.detach().requires_grad_() if log_probs.requires_grad else log_probs
        of_all = torch.cat(entropies) if entropies and self.mistake != "without entropies" else None
        return Scores(log_probs, of_all, None)

    def row(self, rows, i):
        kept = rows.attention_mask[i].bool()
        if self.mistake == "padding":
            kept = torch.ones_like(kept)
        ids, length = rows.input_ids[i][kept][None], int(rows.attention_mask[i, -rows.completion_length :].sum())
        labels = torch.full_like(ids, -100)
        if length:
            first = ids.shape[1] - length
            if self.mistake == "padding":
                first = ids.shape[1] - rows.completion_length
            labels[:, first - 1 : first - 1 + length] = ids[:, first : first + length]
        found = rows.forward(labels, input_ids=ids)
        columns = (labels[0] != -100).nonzero()[:, 0]
        if self.mistake == "shifted":
            columns = columns.roll(-1)
        pad = (0, rows.completion_length - length)
        log_probs, entropies = (
            None if one is None else torch.nn.functional.pad(one[:, columns], pad) for one in found[:2]
        )
        if self.mistake == "hot":
            log_probs = torch.nn.functional.pad(self.at_one(rows.model, ids, length), pad)
        return Scores(log_probs, entropies, None)

    def at_one(self, model, ids, length):
        of_all = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return of_all[:, of_all.shape[1] - length :]

    def micro_batches(self, prompts, tokens, count):
        rows = [[*range(start, len(tokens), count)] for start in range(count)]
        return [[0] * len(some) for some in rows] if self.mistake == "twice" else rows

    def joined(self, tokens):
        return 0 if self.mistake == "none joined" else len(tokens)


def test_a_scorings_mistake_is_named(tiny_trainer, monkeypatch):
    def made(session, options):
        return Alone(session)

    offer = SimpleNamespace(trlx_register=hookimpl(lambda registry: registry.offer("scoring", "alone", made)))
    trainer = tiny_trainer(hybrid={"scoring": "alone"}, plugins=[offer], temperature=0.7)
    for mistake, message in (
        ("", None),
        ("all at once", r"`rows.forward` was given 6 rows where `rows.at_once` is 2\. Split"),
        ("bare", r"`score` did not return Scores with log-probs of shape \(6, 9\)"),
        ("written", "wrote into the rows that it was given"),
        ("shuffled", "They are another row's"),
        ("shifted", "They fit when moved by one token"),
        ("hot", r"They are those at temperature 1, not at 0\.7"),
        ("padding", "neither to padding nor to a neighbour"),
        ("undefined", "some log-probs are not finite"),
        ("without entropies", "returned no entropies in the shape of its log-probs"),
        ("cut", "gradient differs from that of the rows alone"),
        ("twice", "Return 1 lists of 6 row numbers"),
        ("none joined", "`joined` returned 0"),
        ("unrestored", "after `close`, the model has other attention"),
    ):
        monkeypatch.setattr(Alone, "mistake", mistake)
        if message is None:
            check_scoring(trainer)
        else:
            with pytest.raises(ConformanceError, match=message):
                check_scoring(trainer)
    with pytest.raises(ConformanceError, match="has no scoring of a plugin"):
        check_scoring(tiny_trainer())


TURN = "{{- '<|im_start|>' + message.role + '\\n' + %s + '<|im_end|>\\n' -}}"
SPEAK = "{%%- if add_generation_prompt -%%}<|im_start|>assistant\n{%%- endif -%%}"
LOOP = "{%%- for message in messages -%%}%s{%%- endfor -%%}" + SPEAK
CONTENT = "message.content | string"
CALL = "(message.tool_calls | map(attribute='function') | first | tojson if message.tool_calls else message.content)"


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        (LOOP % (TURN % CONTENT), False, None),
        (LOOP % (TURN % "messages | length | string + message.content"), False, "changes what stands before it"),
        (
            LOOP % ("{%- if loop.index < 3 -%}" + TURN % CONTENT + "{%- endif -%}"),
            False,
            "'first' after the model's is not",
        ),
        (
            LOOP % (TURN % CONTENT + "{{ raise_exception('no') if loop.index > 2 }}"),
            False,
            "user, assistant, user cannot",
        ),
        (LOOP % (TURN % "message.role"), False, "'first' after the model's is not shown in full"),
        (LOOP % (TURN % CONTENT), True, "does not show a tool call with its name"),
        (LOOP % (TURN % CALL), True, "has no `response_template`"),
        ("", False, "There is no chat template"),
    ],
)
def test_a_templates_mistake_is_named(template, tools, message):
    tokenizer = chat_tokenizer([])
    tokenizer.chat_template = template
    if message is None:
        check_template(tokenizer, tools=tools)
    else:
        with pytest.raises(ConformanceError, match=message):
            check_template(tokenizer, tools=tools)


def test_a_call_that_is_read_otherwise_is_named():
    tokenizer = chat_tokenizer([])
    tokenizer.chat_template = LOOP % (TURN % CALL)
    fields = {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}}
    start = "<|im_start|>assistant\n"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": fields}
    with pytest.raises(ConformanceError, match=r"Of a call of look_up\(entry='snow'\) the tokenizer reads \[\]"):
        check_template(tokenizer, tools=True)


def test_the_template_of_the_page_passes_once_it_is_changed():
    before, after = re.findall(
        r"```jinja[^\n]*\n(.*?)```", (ROOT / "docs" / "chat-templates.md").read_text(), re.DOTALL
    )
    with pytest.raises(ConformanceError, match="A user's message after the model's changes what stands before it: "):
        check_template(chat_tokenizer([]), before)
    check_template(chat_tokenizer([]), after)


def test_heavy_imports_are_named(tmp_path, monkeypatch):
    (tmp_path / "heavy_plugin.py").write_text("import torch\nprint('hello')\n")
    (tmp_path / "light_plugin.py").write_text("import trlx_hybrid\nprint('hello')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_imports("light_plugin")
    check_imports("trlx_hybrid_vllm.plugin")
    with pytest.raises(ConformanceError, match="plugin heavy_plugin imports torch when it is loaded"):
        check_imports("heavy_plugin")
    with pytest.raises(ConformanceError, match="does not import"):
        check_imports("no_such_plugin")


def test_two_processes_and_a_clock(two_processes, fake_clock, tmp_path):
    import time

    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\nfrom pathlib import Path\n"
        "rank = os.environ['RANK']\nPath(sys.argv[1], f'rank{rank}.json').write_text(json.dumps([rank, sys.argv[2]]))\n"
    )
    assert two_processes(script, "x") == [["0", "x"], ["1", "x"]]
    before = time.monotonic()
    time.sleep(3600.0)
    assert time.monotonic() - before == 3600.0
    assert sys.modules["torch"] is torch
