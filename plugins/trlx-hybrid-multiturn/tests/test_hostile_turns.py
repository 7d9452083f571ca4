"""Turns and answers that a model or the web wrote to break what reads them: the rows end well, shown and counted."""

import contextlib
import re
from types import SimpleNamespace

import pytest
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, get_training_chat_template, parse_response
from trlx_hybrid.contract.conversation import Dialogue, Limits
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.errors import ConfigError
from trlx_hybrid.testing.chat import chat_tokenizer
from trlx_hybrid.trl.generation.tool_calling import observer
from trlx_hybrid_multiturn.multi_turn import MultiTurn
from trlx_hybrid_multiturn.options import MultiTurnOptions

BRACKETS = '<tool_call>\n{"name": "calculate", "arguments": ' + "[" * 5000
PLAIN = "a plain answer"
ROW = 10  # the token of some character, which is the prompt of rows that speak the first turn first
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def calculate(expression: str = "") -> object:
    """Calculate.

    Args:
        expression: what.
    """
    if expression == "raise":
        raise SilentError
    if expression.startswith("search"):
        return [expression] if expression.endswith("list") else expression
    made = {"object": Unprintable(), "objects": [Unprintable()]}
    if expression in made:
        return made[expression]
    return eval(expression, {"__builtins__": {"chr": chr}}, {})


class Stream:
    """An engine that speaks turns: of each prompt those of its row, one after the other."""

    shared = False

    def __init__(self, spoken):
        self._spoken, self._waiting = spoken, []

    def add(self, request):
        self._waiting.append(request)
        return id(request)

    @property
    def busy(self):
        return bool(self._waiting)

    def step(self, more):
        asked, self._waiting = self._waiting, []
        return [(id(r), Completion(token_ids=self._spoken(r), logprobs=None)) for r in asked], more


class Rig:
    """Conversations on such an engine, with TRL's own parser and Qwen3's template."""

    def __init__(self, turns, **options):
        self.tokenizer = add_response_schema(chat_tokenizer([*turns, PLAIN]))
        self.turns = self.tokenizer.convert_tokens_to_ids([*turns, PLAIN])
        trainer = object.__new__(GRPOTrainer)
        template = get_training_chat_template(self.tokenizer)
        vars(trainer).update(_is_vlm=False, chat_template=template, chat_template_kwargs={})
        vars(trainer).update(_tokenizer=self.tokenizer, processing_class=self.tokenizer)
        self.observe = observer(trainer)
        stream = Stream(lambda r: [self.turns[r.prompt_ids[0] - ROW if len(r.prompt_ids) == 1 else -1]])
        engine = SimpleNamespace(stream=lambda sampling: contextlib.nullcontext(stream))
        self.session = SimpleNamespace(
            ranks=SimpleNamespace(rank=0),
            args=SimpleNamespace(disable_tqdm=True),
            metrics={},
            on_conversation=None,
            sampling=None,
            live_engine=engine,
        )
        self.rollout = MultiTurn(self.session, MultiTurnOptions(max_processes=1, **options))

    def converse(self, rows):
        """What becomes of rows that speak these turns first, by their numbers."""
        dialogues = [
            Dialogue(
                prompt_ids=[ROW + turn],
                parse=lambda ids, before: parse_response(self.tokenizer, ids, prefix=before, tools=[calculate]),
                observe=self.observe,
                sync_tools={"calculate": calculate},
                async_tools={},
                **self.decoding(),
            )
            for turn in rows
        ]
        limits = Limits(completion_tokens=10**6, model_tokens=10**6, tool_turns=5)
        return self.rollout.converse(
            self.session,
            dialogues,
            limits,
            lambda row, turn, ids, images, room: Request(prompt_ids=ids, seed=0, max_tokens=room or 1),
        )

    def well_ended(self, rows):
        """Return what became of the rows that ended well, and what ended all of them if something did."""
        try:
            return [c for c in self.converse(rows) if c.failure is None], None
        except Exception as error:
            return [], error

    def decoding(self):
        if "decode" not in Dialogue.__dataclass_fields__:  # older versions
            return {}
        return {"decode": self.tokenizer.decode}

    def shown(self, conversation):
        """What the model was shown, as text."""
        pairs = zip(conversation.completion_ids, conversation.loss_mask, strict=True)
        return self.tokenizer.decode([token for token, mask in pairs if not mask])


def expression(text):
    return CALL % ("calculate", f'{{"expression": "{text}"}}')


# What the model writes in 8 of 8 rows, and what it must then read.
HOSTILE = {
    "a number of 8,451 digits": (expression("7**9999"), "cannot be turned into a string"),
    "such a number in a list": (expression("[7**9999]"), "cannot be turned into a string"),
    "half a character": (expression("'alpha' + chr(0xD83D)"), "alpha"),
    "half a character in the call": (expression("search alpha \\ud83d"), "alpha"),
    "half a character in a list": (expression("search alpha \\ud83d list"), "alpha"),
    "half a character as the name": (CALL % ("calc\\ud83d", "{}"), "not found"),
    "an object without a text": (expression("object"), "cannot be turned into a string"),
    "such an object in a list": (expression("objects"), "cannot be turned into a string"),
    "an error without a text": (expression("raise"), "SilentError"),
}


@pytest.mark.parametrize("tools", ["thread", "process", "main"])
def test_what_a_model_wrote_ends_no_run(tools):
    rig = Rig([turn for turn, _ in HOSTILE.values()], tools=tools)
    with contextlib.closing(rig.rollout):
        for number, (kind, (_, words)) in enumerate(HOSTILE.items()):
            conversations, error = rig.well_ended([number] * 8)
            assert len(conversations) == 8, (kind, error)
            assert all(words in rig.shown(c) for c in conversations), (kind, rig.shown(conversations[0]))
            assert all(c.messages[-1]["content"] == PLAIN for c in conversations), kind
            counted = [c.failed_calls + c.mended_answers for c in conversations]
            assert counted == [1] * 8, kind


def test_a_turn_that_the_parser_raises_at_is_plain_text():
    """1,000 brackets and more are a RecursionError of Python's JSON; the other rows of the batch go on."""
    rig = Rig([BRACKETS, expression("1+1")])
    with contextlib.closing(rig.rollout):
        conversations, error = rig.well_ended([0] * 7 + [1])
    assert len(conversations) == 8, error
    assert [c.messages[-1]["content"] for c in conversations] == [BRACKETS] * 7 + [PLAIN]
    assert all("RecursionError" in c.unparsed for c in conversations[:7])
    assert all(any(c.loss_mask) for c in conversations)
    assert rig.session.metrics["hybrid/turns/unparsed"] == 7.0


def test_a_parser_that_raises_at_all_rows_stops_the_run():
    rig = Rig([BRACKETS])
    with contextlib.closing(rig.rollout):
        _, error = rig.well_ended([0] * 8)
        assert isinstance(error, ConfigError)
        assert re.search(r"raised at all 8 rows of a batch: RecursionError: .*\(8 times\)", str(error), re.DOTALL)
        rig.converse([1] * 8)
        assert len(rig.converse([0])) == 1  # one row alone may be the model's doing
        with pytest.raises(ConfigError, match="raised at all 1 rows"):
            rig.converse([0])
