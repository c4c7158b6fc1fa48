"""The native index against its definition, and what it costs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from twins import suffix_draft

from tokenmill._native import SuffixIndex

TOKENS = st.integers(0, 3)
STRINGS = st.lists(st.lists(TOKENS, max_size=40), min_size=1, max_size=4)


def drafted(index: SuffixIndex, context, most, floor, trust):
    draft = index.draft(context, most, floor, np.array(trust))
    return list(zip(draft.tokens, draft.matches, draft.shares, strict=True))


def built(strings, depth: int) -> SuffixIndex:
    index = SuffixIndex(depth)
    for string in strings[:-1]:
        index.extend(string)
        index.end()
    index.extend(strings[-1])
    return index


@settings(max_examples=400, deadline=None)
@given(STRINGS, st.lists(TOKENS, max_size=12), st.integers(1, 6), st.integers(0, 10), st.sampled_from([0.0, 0.2, 0.6]))
@example(strings=[[1, 1], [2, 1, 1], []], context=[1], depth=3, most=1, floor=0.0)  # ends are counted, and are the most recent
def test_a_draft_is_what_searching_all_strings_gives(strings, context, depth, most, floor):
    trust = [1 - 0.5 ** (n + 1) for n in range(depth + 1)]
    found = drafted(built(strings, depth), context, most, floor, trust)
    assert found == suffix_draft(strings, context, depth, most, floor, trust)


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=60), st.integers(1, 6))
def test_it_is_right_after_every_token_of_a_string(tokens, depth):
    """The state of the newest string moves, is split and is cut off as it grows."""
    index, trust = SuffixIndex(depth), [1.0] * (depth + 1)
    for end in range(1, len(tokens) + 1):
        index.extend(tokens[end - 1 : end])
        assert drafted(index, tokens[:end], 5, 0, trust) == suffix_draft([tokens[:end]], tokens[:end], depth, 5, 0, trust)


def periodic(period: int, n: int) -> list[int]:
    return [i % period for i in range(n)]


def hostile() -> dict[str, list[int]]:
    rng = random.Random(5)
    fibonacci, other = [0], [0, 1]
    while len(other) < 20_000:
        fibonacci, other = other, other + fibonacci
    fan = [t for i in range(5_000) for t in (0, 1, i + 3)] + [t for i in range(5_000) for t in (2, 1, i + 3)]
    return {
        "one token": periodic(1, 20_000),
        "period 2": periodic(2, 20_000),
        "period 31": periodic(31, 20_000),
        "period 33": periodic(33, 20_000),
        "period 1000": periodic(1000, 20_000),
        "runs": [t for i in range(200) for t in [0] * i + [i % 7 + 1]],
        "runs of one length": [t for i in range(600) for t in [0] * 40 + [i % 7 + 1]],
        "fibonacci": other,
        "two letters": [rng.randrange(2) for _ in range(20_000)],
        "fifty letters": [rng.randrange(50) for _ in range(20_000)],
        "all different": list(range(20_000)),
        "a pair before everything": fan,
        "block copied with changes": [t for _ in range(40) for t in [*periodic(997, 500)[: rng.randrange(500)], rng.randrange(9000)]],
    }


@pytest.mark.parametrize("name", hostile())
def test_work_and_memory_are_bounded_whatever_the_text(name):
    """Steps along chains and lists, counted: on the whole and, but for lists that are copied, for every single token."""
    tokens, depth = hostile()[name], 32
    index, worst, before = SuffixIndex(depth), 0, 0
    for token in tokens:
        index.extend([token])
        worst, before = max(worst, index.work - before), index.work
    n = len(tokens)
    assert index.states <= 2 * n + 1
    assert index.states + index.edges <= 3 * n + depth
    assert index.work <= 3 * (depth + 2) * n
    if name != "a pair before everything":  # where one token copies the 5,000 edges of a state
        assert worst <= 5 * (depth + 2)


@pytest.mark.parametrize("period", [1, 2, 7, 31, 33, 100])
def test_text_that_repeats_takes_no_memory(period):
    index = built([periodic(period, 20 * period + 200)], 32)
    before = index.states, index.edges, index.bytes
    index.extend(periodic(period, 21 * period + 10_000)[20 * period + 200 :])
    assert (index.states, index.edges, index.bytes) == before


def test_a_copy_of_a_long_text_adds_a_bounded_number_of_states():
    rng = random.Random(3)
    text = [rng.randrange(300) for _ in range(5_000)]
    index = built([text], 32)
    index.extend([1_000_000])  # so that the join is not like anything before
    before = index.states
    index.extend(text)
    assert index.states - before <= 64


def test_memory_for_each_token():
    rng = random.Random(3)
    for letters in (2, 50, 1_000, 150_000):
        tokens = [rng.randrange(letters) for _ in range(30_000)]
        assert built([tokens], 32).bytes / len(tokens) < 300, letters


def test_a_bad_depth_and_bad_trust_are_refused():
    with pytest.raises(ValueError, match="depth must be positive"):
        SuffixIndex(0)
    with pytest.raises(ValueError, match="trust must be given"):
        SuffixIndex(4).draft([1], 1, 0.0, np.ones(4))
