"""The pool of rows in flight, on a simulated engine: no group is lost, doubled or late, whatever the lengths."""

import copy
import random
from collections import Counter, UserDict

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trlx_hybrid.contract.conversation import Conversation, PooledEpisode
from trlx_hybrid.contract.types import Completion, Request
from trlx_hybrid.rollout.pool import Pool, PoolRollout


class SimulatedStream:
    """A stream whose rows each have a length of their own: token t of a row is t."""

    shared = False

    def __init__(self, lengths):
        self._lengths, self._running, self._next = lengths, {}, 0
        self._finished, self.sampled_tokens, self.stumbles = {}, 0, 0

    def add(self, request):
        self._running[self._next] = [request, []]
        self._next += 1
        return self._next - 1

    def step(self, more):
        self.work()
        finished, self._finished = list(self._finished.items()), {}
        if self.stumbles and self._running and self.sampled_tokens % self.stumbles == 0:
            finished.append((key := min(self._running), self.sampled(key)))  # interrupted by the engine itself
            del self._running[key]
        return finished, more

    def work(self):
        """Sample a token for each request, as an engine on other GPUs does while the trainer trains."""
        assert len(self._running) <= self.most
        for key, (request, tokens) in list(self._running.items()):
            tokens.append(len(request.prompt_ids) - 1 + len(tokens))
            self.sampled_tokens += 1
            assert len(tokens) <= request.max_tokens
            if len(request.prompt_ids) - 1 + len(tokens) == self._lengths[request.row]:
                self._finished[key] = self._completion(tokens, "stop")
                del self._running[key]

    def sampled(self, key):
        return self._finished.get(key) or self._completion(self._running[key][1], None)

    @staticmethod
    def _completion(tokens, reason):
        return Completion(token_ids=list(tokens), logprobs=[[-1.0]] * len(tokens), finish_reason=reason)


LONGEST = 40


def test_steps_with_few_rows_are_counted():
    pool, lengths = Pool(4, 0), [1, 2, 2, 2, 3, 3, 3, 10]
    stream = SimulatedStream(lengths)
    stream.most = 8

    def begin():
        return pool.begin(pool.begun, [0], 2) if pool.room(1) > 0 else None

    def request(group, place):
        return Request(prompt_ids=[0], seed=0, row=2 * group.number + place, max_tokens=LONGEST)

    rollout = PoolRollout(pool, stream, in_flight=8, version=0, begin=begin, request=request)
    rollout.run()
    assert (rollout.steps, rollout.sampled) == (10, sum(lengths))
    assert rollout.alone == 7  # the last row is by itself from the fourth step on, and two rows would not count


def test_rows_begin_together():
    """In a pool that is always full, a step of the engine that reads prompts reads several."""
    pool, draw = Pool(8, 4), random.Random(0)
    stream = SimulatedStream([draw.randint(20, 60) for _ in range(8 * 5 * 8)])
    stream.most, begun, added = 96, [], stream.add

    def begin():
        return pool.begin(pool.begun, [0], 8) if pool.room(40) > 0 else None

    def request(group, place):
        return Request(prompt_ids=[0], seed=0, row=8 * group.number + place, max_tokens=60)

    rollout = PoolRollout(pool, stream, in_flight=96, version=0, begin=begin, request=request)
    stream.add = lambda request: begun.append(rollout.steps) or added(request)
    rollout.run()
    later = Counter(step for step in begun if step)
    assert len(later) > 1
    assert min(later.values()) >= 96 // 16
    assert rollout.sampled / rollout.steps > 0.95 * 96


@st.composite
def schedules(draw):
    size, batches, completions = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    lengths = st.one_of(st.integers(1, 3), st.integers(1, LONGEST))
    return {
        "size": size,
        "batches": batches,
        "completions": completions,
        "depth": draw(st.integers(0, 4)),
        "in_flight": draw(st.integers(1, 2 * size * completions)),
        "lengths": draw(
            st.lists(lengths, min_size=size * batches * completions, max_size=size * batches * completions)
        ),
        "restored": draw(st.integers(0, 8)),
        "stumbles": draw(st.integers(0, 5)),
        "training": draw(st.one_of(st.just(0), st.integers(1, LONGEST))),  # steps of the engine meanwhile
    }


@settings(max_examples=1000, deadline=None)
@given(schedules())
def test_no_group_is_lost_doubled_or_late(plan):
    pool, trained, sampled = Pool(plan["size"], plan["depth"]), [], 0
    for batch in range(plan["batches"]):
        if batch == plan["restored"]:  # as a checkpoint does
            saved, pool = copy.deepcopy(pool.state()), Pool(plan["size"], plan["depth"])
            pool.load_state(saved)

        def begin(pool=pool, batch=batch):
            left = plan["batches"] - batch
            return pool.begin(pool.begun, [0], plan["completions"]) if pool.room(left) > 0 else None

        def request(group, place):
            row = group.rows[place]
            return Request(
                prompt_ids=[0, *row.token_ids],
                seed=0,
                row=group.number * plan["completions"] + place,
                max_tokens=LONGEST - len(row.token_ids),
            )

        stream = SimulatedStream(plan["lengths"])
        stream.most, stream.stumbles = plan["in_flight"], plan["stumbles"]
        rollout = PoolRollout(pool, stream, in_flight=plan["in_flight"], version=batch, begin=begin, request=request)
        chosen = rollout.run()
        if plan["training"]:
            rollout.go_on()
        for _ in range(plan["training"]):
            stream.work()
        rollout.interrupt()
        sampled += stream.sampled_tokens
        assert len(chosen) == plan["size"]
        for group in chosen:
            assert batch - min(row.versions[0] for row in group.rows) <= plan["depth"]
            for place, row in enumerate(group.rows):
                length = plan["lengths"][group.number * plan["completions"] + place]
                assert (row.token_ids, row.finish_reason) == (list(range(length)), "stop")
                assert len(row.logprobs) == len(row.versions) == length
                assert row.versions == sorted(row.versions)
        trained += [group.index for group in chosen]
    assert sorted(trained) == list(range(plan["size"] * plan["batches"]))
    assert sampled == sum(plan["lengths"])  # none twice
    assert not pool.groups
    if plan["depth"] == 0:
        assert trained == sorted(trained)


def test_what_an_environment_shows_can_be_saved_and_a_row_that_cannot_begins_anew(tmp_path):
    pool = Pool(1, 0, PooledEpisode)
    numpy, foreign, _ = pool.begin(0, [], 3).rows
    shown = [{"role": np.str_("user"), "content": np.str_("left"), "at": (np.float64(2.5), np.int64(3))}]
    numpy.conversation = Conversation(completion_ids=[1], messages=[UserDict(message) for message in shown])
    numpy.reward, numpy.branches = np.float64(0.5), [(0, 1)]
    foreign.conversation, foreign.sampled = Conversation(completion_ids=[2], messages=[{"role": object()}]), 7
    torch.save(pool.state(), tmp_path / "pool.pt")
    again = Pool(1, 0, PooledEpisode)
    again.load_state(torch.load(tmp_path / "pool.pt", weights_only=True))
    first, second, third = again.groups[0].rows
    plain = {"role": "user", "content": "left", "at": (2.5, 3)}
    assert (first.conversation.messages, first.reward, first.branches) == ([plain], 0.5, [(0, 1)])
    assert not second.over
    assert (second.sampled, third.over) == (0, False)
    assert not again.groups[0].told
