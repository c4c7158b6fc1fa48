"""Prompt look-up against its definition."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from twins import ngram_draft

from tokenmill.speculate.draft import Draft
from tokenmill.speculate.ngram import SIZES, NGramIndex, NGramProposer
from tokenmill.speculate.proposer import Wish, Worth

TOKENS = st.integers(0, 2)
FREE = Worth(1, 1.0, lambda rows: 1.0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=1, max_size=12), st.integers(1, 8))
def test_a_draft_is_what_searching_gives_however_the_text_arrived(parts, most):
    proposer, tokens = NGramProposer(), []
    for part in parts:
        tokens += part
        (draft,) = proposer.propose([Wish("a", tokens, len(parts[0]), most)], FREE)
        assert list(draft.tokens) == ngram_draft(tokens, SIZES, most)
        assert len(draft.odds) == len(draft.tokens)


def test_the_match_is_as_long_as_the_text_is_the_same():
    index, text = NGramIndex(), [7, 1, 2, 3, 4, 5, 6, 9, 8, 1, 2, 3, 4, 5, 6]
    index.extend(text)
    assert index.find(text) == (7, 6)
    same = list(range(100, 150)) * 2
    index = NGramIndex()
    index.extend(same)
    assert index.find(same) == (50, 32)  # longer ones count as this long


def test_a_continuation_that_reaches_the_end_goes_on_with_itself():
    proposer = NGramProposer()
    assert proposer.propose([Wish("a", [1, 2, 3, 1, 2, 3, 1, 2], 2, 7)], FREE)[0].tokens == (3, 1, 2, 3, 1, 2, 3)
    assert proposer.propose([Wish("b", [5] * 4, 2, 6)], FREE)[0].tokens == (5,) * 6


def test_nothing_is_looked_up_in_other_sequences():
    proposer = NGramProposer()
    proposer.propose([Wish("a", [1, 2, 3, 4, 5, 6], 2, 4)], FREE)
    assert proposer.propose([Wish("b", [1, 2, 3], 2, 4)], FREE) == [Draft()]


def test_memory_for_each_token():
    tokens = [n * 7919 % 100_003 for n in range(30_000)]
    tracemalloc.start()
    index = NGramIndex()
    index.extend(tokens)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.find(tokens) == (0, 0)
    assert held / len(tokens) < 500
