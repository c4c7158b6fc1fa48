"""Trust in matches is measured."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenmill.speculate.ngram import NGramProposer
from tokenmill.speculate.odds import LONGEST, Odds, Promise, Track
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.speculate.suffix import SuffixProposer

WORTH = Worth(1, 1.0, lambda rows: 0.7 + 0.3 * rows)


def test_trust_grows_with_what_came_true_and_falls_with_what_did_not():
    track = Track(Odds())
    before = track.trust.copy()
    for start in range(0, 200, 2):
        track.promise(start, [Promise(1, 2, 1.0), Promise(1, 10, 1.0)])
        track.check([1] * (start + 1) + [2])
    assert track.trust[2] > 0.9 > before[2]
    assert track.trust[10] < 0.1 < before[10]
    assert track.trust[30] == before[30]
    assert track.trust.shape == (LONGEST + 1,)


def test_nothing_is_learnt_beyond_the_first_wrong_token_nor_before_tokens_come():
    track = Track(Odds())
    before = track.trust.copy()
    track.promise(3, [Promise(1, 2, 1.0), Promise(1, 10, 1.0)])
    track.check([0, 0, 0])
    assert np.array_equal(track.trust, before)
    track.check([0, 0, 0, 5, 1])
    assert track.trust[2] < before[2]
    assert track.trust[10] == before[10]


def test_a_share_is_what_was_promised():
    """Half of the time right is all that a token with a share of a half has promised."""
    track = Track(Odds())
    for start in range(200):
        track.promise(start, [Promise(start % 2, 10, 0.5)])
        track.check([0] * (start + 1))
    assert track.trust[10] > 0.9


def test_a_sequence_starts_with_what_others_have_shown_and_then_counts_for_itself():
    common = Odds()
    for _ in range(100):
        common.note(Promise(1, 10, 1.0), False)
    track = Track(common)
    assert track.trust[10] < 0.1
    for start in range(60):
        track.promise(start, [Promise(1, 10, 1.0)])
        track.check([1] * (start + 1))
    assert track.trust[10] > 0.8


def test_evidence_fades():
    odds = Odds()
    for kept, n in ((True, 1_000), (False, 100)):
        for _ in range(n):
            odds.note(Promise(1, 1, 1.0), kept)
    assert odds.rates[1] < 0.4


@pytest.mark.parametrize("make", [lambda: NGramProposer(), lambda: SuffixProposer(0)], ids=["ngram", "suffix"])
def test_a_sequence_that_begins_to_repeat_itself_is_drafted_again(make):
    """Odds that have fallen under the floor rise as soon as drafts would have come true: for matches of the very same length."""
    rng, proposer, tokens, given = random.Random(1), make(), list(range(4)), []
    for step in range(400):
        tokens += [rng.randrange(1_000, 90_000), 1, 2, 3]
        (draft,) = proposer.propose([Wish("a", tokens, 4, 1)], WORTH)
        given.append(draft.tokens)
        tokens.append(rng.randrange(1_000, 90_000) if step < 150 else 7)
        proposer.propose([Wish("a", tokens, 4, 0)], WORTH)
    assert given[149] == ()
    assert given[-1] == (7,)
