"""The suffix proposer: what it looks up where, and what it keeps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.speculate.draft import Draft
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.speculate.suffix import NAMESPACE_TOKENS, EarlierOutputs, SuffixProposer

TEXT = list(range(50, 90))
FREE = Worth(1, 1.0, lambda rows: 1.0)


def proposer(room: int = 10_000) -> SuffixProposer:
    return SuffixProposer(room)


def finished(p: SuffixProposer, key: str, prompt: list[int], output: list[int], namespace: str = "") -> None:
    tokens = list(prompt)
    p.propose([Wish(key, tokens, len(prompt), 0, namespace)], FREE)
    tokens += output  # what comes after it was last asked
    p.forget(key)


def tokens_of(p: SuffixProposer, key: str, tokens: list[int], most: int = 5, namespace: str = "") -> tuple[int, ...]:
    (draft,) = p.propose([Wish(key, tokens, len(tokens), most, namespace)], FREE)
    return draft.tokens


def test_it_looks_in_prompt_and_own_output():
    assert tokens_of(proposer(), "a", [*TEXT, 1, 2, 60, 61]) == (62, 63, 64, 65, 66)


def test_it_looks_in_outputs_of_others_once_they_are_over():
    p = proposer()
    running = [3, *TEXT]
    p.propose([Wish("a", running, 1, 0)], FREE)
    assert tokens_of(p, "b", [60, 61]) == ()
    p.forget("a")
    assert tokens_of(p, "c", [60, 61]) == (62, 63, 64, 65, 66)


def test_prompts_of_others_are_never_proposed():
    p = proposer()
    finished(p, "a", prompt=TEXT, output=[1, 2, 3])
    assert tokens_of(p, "b", [60, 61]) == ()


def test_other_namespaces_see_nothing():
    p = proposer()
    finished(p, "a", [1], TEXT, namespace="red")
    assert tokens_of(p, "b", [60, 61], namespace="blue") == ()
    assert tokens_of(p, "c", [60, 61]) == ()
    assert tokens_of(p, "d", [60, 61], namespace="red") == (62, 63, 64, 65, 66)


def test_what_promises_more_tokens_wins():
    p = proposer()
    finished(p, "a", [1], TEXT)
    assert tokens_of(p, "b", [2, 61, 7, 8, 58, 59, 60, 61]) == (62, 63, 64, 65, 66)  # a match of 4 in "a", of 1 in itself
    assert tokens_of(p, "c", [59, 60, 61, 7, 8, 9, 59, 60, 61]) == (7, 8, 9, 59, 60)  # equals: itself


def test_a_sequence_asked_again_after_a_pause_goes_on():
    p, tokens = proposer(), list(TEXT)
    p.propose([Wish("a", tokens, len(TEXT), 4)], FREE)
    tokens += [1, 2, 3, 60, 61]
    assert p.propose([Wish("a", tokens, len(TEXT), 3)], FREE)[0].tokens == (62, 63, 64)
    assert p.propose([Wish("a", tokens, len(TEXT), 3)], FREE)[0].tokens == (62, 63, 64)


def test_the_most_is_kept_and_zero_is_allowed():
    p = proposer()
    for most in (0, 1, 2, 12):
        (draft,) = p.propose([Wish(most, [*TEXT, 60, 61], 3, most)], FREE)
        assert len(draft.tokens) == len(draft.odds) == most
    assert p.propose([Wish("none", [1, 2, 3], 3, 5)], FREE) == [Draft()]


def test_a_draft_ends_under_the_floor():
    p = SuffixProposer(100)
    (draft,) = p.propose([Wish("a", [*TEXT, *TEXT[:20]], 3, 40)], Worth(1, 1.0, lambda rows: 0.5 + 0.5 * rows))
    assert 0 < len(draft.tokens) < 40
    product = 1.0
    for odds in draft.odds:
        product *= odds
    assert product >= 0.5
    assert product * draft.odds[-1] < 0.5


def test_odds_follow_what_came_true():
    """Of two sequences with the same matches, one repeats itself and the other never does."""
    rng = random.Random(1)
    odds = {}
    for kept in (True, False):
        p, tokens = proposer(), list(TEXT)
        for _ in range(60):
            tokens += TEXT[:4]
            (draft,) = p.propose([Wish("a", tokens, 1, 1)], FREE)
            tokens.append(draft.tokens[0] if kept else rng.randrange(1_000, 90_000))
        tokens += TEXT[:4]
        odds[kept] = p.propose([Wish("a", tokens, 1, 1)], FREE)[0].odds[0]
    assert odds[True] > 0.9
    assert odds[False] < 0.1


@pytest.mark.parametrize("output", [1, 40, 300])
def test_earlier_outputs_take_bounded_memory_and_the_oldest_go_first(output):
    room, rng, earlier = 1_000, random.Random(2), EarlierOutputs(1_000)
    for number in range(400):
        earlier.add(str(number % 7), [number + 1_000] + [rng.randrange(900) for _ in range(output - 1)])
        states = sum(index.states for name in range(7) for index in earlier.indexes(str(name)))
        assert states <= 2 * room + 14
    assert earlier.indexes(str(399 % 7))
    first = [index for name in range(7) for index in earlier.indexes(str(name))]
    earlier.add("new", [1] * 400)
    earlier.add("new", [1] * 400)
    earlier.add("new", [1] * 400)
    left = [index for name in range(7) for index in earlier.indexes(str(name))]
    assert first
    assert not left


def test_many_namespaces_take_bounded_memory():
    earlier = EarlierOutputs(10 * NAMESPACE_TOKENS)
    for number in range(1_000):
        earlier.add(str(number), [1])
    assert sum(bool(earlier.indexes(str(number))) for number in range(1_000)) <= 10


def test_without_room_nothing_is_kept():
    p = proposer(room=0)
    finished(p, "a", [1], TEXT)
    assert tokens_of(p, "b", [60, 61]) == ()


def test_an_unknown_key_is_forgotten_without_a_word():
    proposer().forget("nobody")


CALLS = st.lists(
    st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 6), st.booleans()), max_size=40
)


@settings(max_examples=100, deadline=None)
@given(CALLS)
def test_the_same_calls_give_the_same_drafts(calls):
    """And no draft is longer than was asked for, whatever the calls."""

    def run() -> list[Draft]:
        p, texts, drafts = SuffixProposer(60), {}, []
        for key, tokens, most, over in calls:
            text = texts.setdefault(key, [9])
            text += tokens
            drafts += p.propose([Wish(key, text, 1, most, "even" if key == "b" else "odd")], FREE)
            assert len(drafts[-1].tokens) <= most
            assert all(0 <= odds <= 1 for odds in drafts[-1].odds)
            if over:
                p.forget(key)
                del texts[key]
        return drafts

    assert run() == run()
