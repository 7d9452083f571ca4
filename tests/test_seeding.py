import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from trlx_hybrid.contract.types import Request
from trlx_hybrid.rollout.seeding import RowTracker, preserved_generators, request_seed, several

small = st.integers(0, 2**31)


@given(st.tuples(small, st.sampled_from(["train", "eval"]), small, small, small, small), st.integers(0, 5), small)
def test_seeds_fit_vllm_repeat_and_depend_on_every_part(key, position, other):
    seed = request_seed(*key)
    assert 0 <= seed < 2**63
    assert seed == request_seed(*key)
    changed = list(key)
    changed[position] = other if position != 1 else "eval" if key[1] == "train" else "train"
    assert (request_seed(*changed) == seed) == (tuple(changed) == key)


@given(st.integers(0, 2**63 - 1), st.integers(1, 6))
def test_several_of_a_prompt_are_other_draws_however_many_are_asked_for(seed, count):
    asking = Request(prompt_ids=[1, 2], seed=seed, row=3, turn=1, max_tokens=5)
    asked = several(asking, count)
    assert asked == several(asking, 6)[:count]
    assert asked[0] is asking
    assert len({request.seed for request in asked}) == count
    for request in asked:
        assert 0 <= request.seed < 2**63
        assert (request.prompt_ids, request.row, request.turn, request.max_tokens) == ([1, 2], 3, 1, 5)


def test_generators_come_back_as_they_were():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with preserved_generators():
        random.random(), np.random.rand(), torch.rand(3)
        torch.manual_seed(5)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 4))
def test_rows_do_not_depend_on_how_many_processes_share_them(prompts, world):
    prompts = [p for p in prompts for _ in range(world)]
    whole = RowTracker(0).place(prompts)
    share = len(prompts) // world
    parts = [RowTracker(rank * share).place(prompts[rank * share : (rank + 1) * share]) for rank in range(world)]
    assert [place for part in parts for place in part] == whole


@given(st.data())
def test_a_tool_turn_is_recognised_by_what_was_sampled_before(data):
    prompts = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=5))
    tracker = RowTracker(100)
    places = tracker.place(prompts)
    completions = [[50 + i] for i in range(len(prompts))]
    tracker.extend(places, prompts, completions)
    going_on = data.draw(st.lists(st.integers(0, len(prompts) - 1), unique=True).map(sorted))
    second = [[*prompts[i], *completions[i], 7] for i in going_on]
    assert tracker.place(second) == [(100 + i, 1) for i in going_on]


def test_prompts_that_continue_nothing_still_get_places_of_their_own():
    tracker = RowTracker(0)
    tracker.extend(tracker.place([[1], [2]]), [[1], [2]], [[3], [4]])
    assert tracker.place([[9], [8]]) == [(0, 1), (1, 1)]
    assert tracker.place([[9], [8]]) == [(0, 2), (1, 2)]
