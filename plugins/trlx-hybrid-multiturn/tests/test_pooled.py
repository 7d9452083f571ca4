"""Conversations of a pool on a simulated engine: wherever they are interrupted and restored, they are the same."""

import asyncio
import copy
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trlx_hybrid.contract.conversation import Dialogue, Limits, PooledConversation
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.rollout.pool import Pool
from trlx_hybrid_multiturn.multi_turn import MultiTurn, TrajectoriesFailedError
from trlx_hybrid_multiturn.options import MultiTurnOptions

SHOWN = -1  # the token of an answer
LONGEST = 30
SIZE, COMPLETIONS = 2, 2


class Stream:
    """An engine whose turns each have a length of their own: a token is the number of tokens before it."""

    shared = False

    def __init__(self, lengths):
        self._lengths, self._running, self._next, self.most = lengths, {}, 0, 0
        self._alone = {}

    def add(self, request):
        self._running[self._next] = [request, []]
        self._next += 1
        self.most = max(self.most, len(self._running))
        return self._next - 1

    def step(self, more):
        finished = []
        for key, (request, tokens) in list(self._running.items()):
            place = len(request.prompt_ids) + len(tokens)
            tokens.append(place)
            before = request.prompt_ids
            begun = len(before) - max(at for at, token in enumerate(before) if token == SHOWN) - 1
            assert len(tokens) <= request.max_tokens
            ends = begun + len(tokens) == self._lengths[request.row][request.turn]
            if ends or len(tokens) == request.max_tokens:
                finished.append((key, self._completion(tokens, request.seed, "stop" if ends else "length")))
                del self._running[key]
        return finished, more

    def go_on(self, steps):
        """Sample what is left to it, while the trainer trains."""
        for _ in range(steps):
            self._alone |= dict(self.step(True)[0])

    def sampled(self, key):
        if key in self._alone:
            return self._alone[key]
        request, tokens = self._running[key]
        return self._completion(tokens, request.seed, None)

    @property
    def busy(self):
        return bool(self._running)

    @staticmethod
    def _completion(tokens, seed, reason):
        return Completion(token_ids=list(tokens), logprobs=[[seed]] * len(tokens), finish_reason=reason)


class Conversations:
    """A pool whose prompt number i has two rows, each with a list of lengths of turns; all turns but the last call."""

    in_flight = 4

    def __init__(self, lengths, batches, depth, tools, goes_on=False):
        self.goes_on, self.version = goes_on, 0
        self.pool = Pool(SIZE, depth, PooledConversation)
        self.lengths, self._batches, self._tools = lengths, batches, tools
        self.limits = Limits(completion_tokens=LONGEST, model_tokens=1000, tool_turns=3)

    def unfinished(self):
        return [row for group in self.pool.groups for row in group.rows if not row.over]

    def begin(self):
        if self.pool.room(self._batches - self.pool.batch) <= 0:
            return ()
        return self.pool.begin(self.pool.begun, [SHOWN], COMPLETIONS).rows

    def batch(self):
        groups = self.pool.ready()
        return None if groups is None else [row for group in groups for row in group.rows]

    def number(self, row):
        at = [(group.number, place) for group in self.pool.groups for place, own in enumerate(group.rows) if own is row]
        return at[0][0] * COMPLETIONS + at[0][1]

    def dialogue(self, row):
        lengths = self.lengths[self.number(row)]

        def parse(token_ids, before):
            turn = len(row.conversation.turns) - 1
            name = [*self._tools][turn % len(self._tools)]
            call = {"type": "function", "function": {"name": name, "arguments": {"turn": turn}}}
            return {"role": "assistant", "content": "", "tool_calls": [call] if turn + 1 < len(lengths) else []}

        return Dialogue(
            prompt_ids=[SHOWN], parse=parse, observe=lambda messages: [SHOWN], sync_tools=self._tools, async_tools={}
        )

    def request(self, row):
        number = self.number(row)

        def request(index, turn, prompt_ids, images, max_tokens):
            return Request(
                prompt_ids=prompt_ids, seed=row.requests, row=number, turn=turn, images=images, max_tokens=max_tokens
            )

        return request


def rollout(**options):
    options = {"progress": False, "tools": "main", "max_turns": 4} | options
    return MultiTurn(SimpleNamespace(ranks=SimpleNamespace(rank=0), args=None), MultiTurnOptions(**options))


def session(lengths, stream=Stream):
    """What `play` needs of a run; its engine's streams are collected."""
    streams = []

    class Opened(stream):
        def __enter__(self):
            streams.append(self)
            return self

        def __exit__(self, *error):
            return None

    engine = SimpleNamespace(stream=lambda sampling: Opened(lengths))
    return SimpleNamespace(
        live_engine=engine, sampling=SimpleNamespace(max_tokens=LONGEST), metrics={}, streams=streams
    )


def look(turn):
    if turn == 1:
        raise ValueError("an error that the model is shown")
    return "seen"


def expected(lengths):
    """The tokens, masks and counts of a conversation that is played at once."""
    ids, mask = [], []
    for turn, length in enumerate(lengths):
        room = LONGEST - len(ids)
        ids += range(1 + len(ids), 1 + len(ids) + min(length, room))
        mask += [1] * min(length, room)
        if turn + 1 == len(lengths):
            return ids, mask, turn
        if len(ids) + 1 > LONGEST:
            return ids, mask, turn + 1
        ids, mask = [*ids, SHOWN], [*mask, 0]
        if len(ids) == LONGEST:
            return ids, mask, turn + 1
    raise AssertionError("no turns")


@st.composite
def plans(draw):
    batches, depth = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    rows = SIZE * batches * COMPLETIONS
    turns = st.lists(st.one_of(st.integers(1, 2), st.integers(1, 20)), min_size=1, max_size=4)
    lengths = draw(st.lists(turns, min_size=rows, max_size=rows))
    return lengths, batches, depth, draw(st.integers(0, 6)), draw(st.none() | st.integers(0, 8))


@settings(max_examples=100, deadline=None)
@given(plans())
def test_conversations_are_the_same_wherever_they_are_interrupted(plan):
    """Also where an engine goes on by itself while the trainer trains, for some steps."""
    lengths, batches, depth, restored, alone = plan
    goes_on = alone is not None
    plays, pool, run = rollout(), Conversations(lengths, batches, depth, {"look": look}, goes_on), session(lengths)
    trained = []
    for batch in range(batches):
        plays.interrupt()
        if batch == restored:  # as a checkpoint does
            state = copy.deepcopy(pool.pool.state())
            plays.close()
            pool, plays = Conversations(lengths, batches, depth, {"look": look}, goes_on), rollout()
            pool.pool.load_state(state)
        pool.version = batch
        plays.play(run, pool)
        for group in pool.pool.ready():
            for place, row in enumerate(group.rows):
                conversation, number = row.conversation, group.number * COMPLETIONS + place
                ids, mask, calls = expected(lengths[number])
                assert (conversation.completion_ids, conversation.loss_mask, conversation.calls) == (ids, mask, calls)
                assert conversation.failed_calls == (calls > 1)
                versions = conversation.weight_versions
                assert len(versions) == len(conversation.logprobs) == len(ids)
                assert versions == sorted(versions)
                assert 0 <= batch - versions[0] <= depth
                assert sum(turn.sampled + turn.observed for turn in conversation.turns) == len(ids)
                pieces = [seed for seed, own in zip(conversation.logprobs, mask, strict=True) if own]
                assert pieces == sorted(pieces)  # each request of a row has the next seed
            trained.append(group.number)
        pool.pool.take(pool.pool.ready())
        run.streams[-1].go_on(alone or 0)
    assert sorted(trained) == list(range(SIZE * batches))
    assert all(stream.most <= pool.in_flight for stream in run.streams)


def test_calls_of_a_saved_conversation_are_made_again(gate):
    """The run that saved it goes on with the call that it has made."""
    made, lengths = [], [[2, 2, 1], *[[6]] * 11]

    def hang(turn):
        made.append(turn)
        if len(made) == 1:
            gate.wait()
        return "seen"

    def playing():
        modes = {"look": "main", "hang": "thread"}
        return rollout(tool_modes=modes), Conversations(lengths, 3, 2, {"look": look, "hang": hang})

    def finished(plays, pool, run):
        while pool.pool.batch < 3:
            plays.play(run, pool)
            for group in pool.pool.ready():
                for row in group.rows:
                    found[group.number].append((row.conversation.completion_ids, row.conversation.calls))
            pool.pool.take(pool.pool.ready())
        plays.close()

    (plays, pool), run, found = playing(), session(lengths), defaultdict(list)
    plays.play(run, pool)
    assert [group.number for group in pool.pool.ready()] == [1, 2]  # the group whose call hangs is not waited for
    pool.pool.take(pool.pool.ready())
    state, slow = copy.deepcopy(pool.pool.state()), pool.pool.groups[0].rows[0]
    assert (slow.conversation.calls, slow.counts[0]) == (2, 1)
    gate.set()
    finished(plays, pool, run)
    assert made == [1]
    once, found = found, defaultdict(list)
    again, others = playing()
    others.pool.load_state(state)
    finished(again, others, run)
    assert made == [1, 1]
    assert found == once
    assert found[0][0][1] == 2


def test_broken_conversations_are_counted_in_the_batch_that_trains_them(gate):
    lengths = [[1, 1], *[[1]] * 11]

    def looks(turn):
        raise asyncio.CancelledError

    def playing(**options):
        plays, pool, run = (
            rollout(tools="thread", **options),
            Conversations(lengths, 3, 2, {"look": looks}),
            session(lengths),
        )
        batches = []
        while pool.pool.batch < 3:
            plays.play(run, pool)
            batches.append([row.conversation for row in pool.batch()])
            pool.pool.take(pool.pool.ready())
        plays.close()
        return batches

    failed = [c for batch in playing() for c in batch if c.failure is not None]
    assert len(failed) == 1
    assert not any(failed[0].loss_mask)
    assert len(failed[0].weight_versions) == len(failed[0].completion_ids)
    with pytest.raises(TrajectoriesFailedError, match=r"1 of 4 trajectories broke off, 0 may"):
        playing(max_failed=0.0)


def test_an_answer_at_the_last_moment_changes_the_batch_and_its_metrics(gate):
    """A call ends while the engine is interrupted, and an older group is complete by it."""
    lengths = [[1, 1], *[[6]] * 5, *[[9]] * 6]

    def lost(turn):
        gate.wait()
        raise asyncio.CancelledError

    class Interrupted(Stream):
        def sampled(self, key):
            gate.set()
            deadline = time.monotonic() + 60
            while plays._in_flight._loop._inbox.empty() and pool.unfinished()[0].conversation.failure is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            return super().sampled(key)

    plays, pool = rollout(tools="thread", max_failed=1.0), Conversations(lengths, 3, 2, {"look": lost})
    run = session(lengths, Interrupted)
    plays.play(run, pool)
    plays.close()
    assert [group.number for group in pool.pool.ready()] == [0, 1]
    assert run.metrics["hybrid/trajectories/failed"] == 1
