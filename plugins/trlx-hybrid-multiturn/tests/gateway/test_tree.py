"""The tree of what was said: whatever an agent asks in whatever order, each request is shown what it says."""

import random

import pytest
from trlx_hybrid_multiturn.gateway.asked import Asked, compared
from trlx_hybrid_multiturn.gateway.errors import RefusedError
from trlx_hybrid_multiturn.gateway.tree import Tree

PROMPT = [{"role": "user", "content": "hello"}]


def says(text):
    return {"role": "assistant", "content": text}


def ask(*messages, tools=()):
    told = [message if isinstance(message, dict) else {"role": "user", "content": message} for message in messages]
    return Asked(messages=told, tools=list(tools))


@pytest.mark.parametrize("seed", range(50))
def test_the_branch_and_what_is_new_are_the_whole_request(seed):
    """Messages stand for tokens: those before the message that is continued, and the new ones, are the request."""
    chance, tree = random.Random(seed), Tree(PROMPT)
    branches, histories, open_ones, draws = {}, [PROMPT], [], set()
    for number in range(60):
        if open_ones and chance.random() < 0.5:
            place, asked = open_ones.pop(chance.randrange(len(open_ones)))
            if chance.random() < 0.2:
                tree.refused(place)
                continue
            said = says(f"answer {number}" if chance.random() < 0.8 else "the same")
            before = branches[place.after[0]][place.after[1]] if place.after else []
            if place.after is None or place.after[0] != place.branch:
                branches[place.branch] = []
            branches[place.branch].append([*before, *place.new, said])
            tree.answered(place, [compared(said)])
            histories.append([*asked.messages, said])
        else:
            history = chance.choice(histories)
            if history is not PROMPT or chance.random() < 0.5:
                history = [*history, {"role": "user", "content": f"{chance.randrange(4)}"}]
            asked = ask(*history)
            place = tree.placed(asked)
            before = branches[place.after[0]][place.after[1]] if place.after else []
            assert [*before, *place.new] == asked.messages
            longest = max((len(told) for told in histories[1:] if told == asked.messages[: len(told)]), default=0)
            assert len(before) == longest
            assert place.draw not in draws or place.draw < 60
            draws.add(place.draw)
            open_ones.append((place, asked))


def test_a_message_is_continued_once_and_then_branches():
    tree = Tree(PROMPT)
    first = tree.placed(ask(*PROMPT))
    tree.answered(first, [compared(says("one"))])
    second = tree.placed(ask(*PROMPT, says("one"), "more"))
    beside = tree.placed(ask(*PROMPT, says(" one"), "less"))  # the second is still being sampled
    assert (first.branch, second.branch, beside.branch) == (0, 0, 1)
    assert first.after is None
    assert second.after == beside.after == (0, 0)
    assert [message["content"] for message in beside.new] == ["less"]


def test_seeds_depend_on_what_is_asked_and_not_on_the_order():
    def draws(*requests):
        tree = Tree(PROMPT)
        return [tree.placed(request).draw for request in requests]

    one, other = ask("one"), ask("other")
    assert draws(one, other) == draws(other, one)[::-1]
    assert len({*draws(one, one, other, other)}) == 4
    assert draws(one, one, other)[:2] == draws(one, other, one)[::2]
    assert draws(one, one)[0] != draws(ask("one", tools=[{"name": "add"}]))[0]


def test_the_rows_own_conversation_is_numbered_as_an_environments_turns_are():
    tree, messages = Tree(PROMPT), list(PROMPT)
    for turn in range(3):
        place = tree.placed(ask(*messages))
        assert place.draw == turn
        tree.answered(place, [compared(says("yes"))])
        messages += [says("yes"), {"role": "user", "content": "and?"}]
    assert tree.placed(ask(*PROMPT)).draw > 3


def test_where_there_may_be_one_branch_its_continuation_is_served_and_no_other():
    tree = Tree(branching=False)
    place = tree.placed(ask("hello"))
    with pytest.raises(RefusedError, match="one conversation for an episode"):
        tree.placed(ask("hello"))
    tree.answered(place, [compared(says("yes"))])
    assert tree.placed(ask("hello", says("yes"), "more")).branch == 0
    assert "one conversation" in tree.refusal


def test_a_branch_that_never_began_does_not_count():
    tree = Tree(PROMPT, branching=False)
    tree.refused(tree.placed(ask(*PROMPT)))
    assert tree.placed(ask(*PROMPT)).draw == 0
    assert tree.refusal is None
