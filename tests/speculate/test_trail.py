"""What a draft model believes of frames that change hands without a word."""

from __future__ import annotations

import random

from tokenmill.core.types import FRAME
from tokenmill.kv.table import HOLE, PageTable
from tokenmill.speculate.confidence import CLASSES, Confidence
from tokenmill.speculate.trail import Marks, Trail

TEXT = list(range(100, 164))


def table(*frames: int) -> PageTable:
    found = PageTable()
    for frame in frames:
        found.append(frame, 1)
    return found


def known(marks: Marks, pages: PageTable, tokens: list[int]) -> Trail:
    """A sequence whose tokens are computed."""
    trail = Trail(marks)
    _, computed = trail.computed(pages, tokens)
    trail.note(tokens, computed, tokens[computed:])
    return trail


def test_what_was_computed_need_not_be_again() -> None:
    trail, pages = Trail(Marks(16)), table(3, 5, 4)
    assert trail.computed(pages, TEXT[:20]) == (0, 0)
    trail.note(TEXT[:20], 0, TEXT[:19])
    assert trail.computed(pages, TEXT[:20]) == (0, 19)


def test_a_prefix_that_another_sequence_computed_is_found_and_its_unfinished_frame_is_not() -> None:
    marks = Marks(16)
    known(marks, table(3, 5, 4), TEXT[:20])
    assert Trail(marks).computed(table(3, 5, 9), TEXT[:22]) == (0, 16)
    assert Trail(marks).computed(table(3, 5, 4), TEXT[:22]) == (0, 16)
    assert Trail(marks).computed(table(3, 7), TEXT[:12]) == (0, 8)


def test_the_same_frames_with_other_tokens_are_not_believed() -> None:
    marks = Marks(16)
    known(marks, table(3, 5), TEXT[:16])
    assert Trail(marks).computed(table(3, 5), [1, *TEXT[1:16]]) == (0, 0)
    assert Trail(marks).computed(table(5, 3), TEXT[:16]) == (0, 0)


def test_a_frame_that_another_took_over_is_computed_again() -> None:
    marks, pages = Marks(16), table(3, 5)
    mine = known(marks, pages, TEXT[:12])
    known(marks, table(5), [9] * 4)
    assert mine.computed(pages, TEXT[:12]) == (0, 8)


def test_after_a_preemption_only_full_frames_are_believed() -> None:
    """Its own unfinished frame may have come back in another place."""
    marks = Marks(16)
    mine = known(marks, table(3, 5, 4), TEXT[:20])
    assert mine.computed(table(3, 4, 5), TEXT[:20]) == (0, 8)
    assert mine.computed(table(3, 5, 4), TEXT[:20]) == (0, 16)


def test_drafted_tokens_count_as_far_as_they_were_right() -> None:
    trail, pages = Trail(Marks(16)), table(3, 5, 4)
    trail.computed(pages, TEXT[:13])
    trail.note(TEXT[:13], 0, [*TEXT[:13], *TEXT[13:17], 7, 7])
    assert trail.computed(pages, TEXT[:19]) == (0, 17)
    trail.note(TEXT[:19], 17, [*TEXT[17:19], 8])
    assert trail.computed(pages, [*TEXT[:19], 9]) == (0, 19)


def test_before_a_hole_nothing_is_computed_and_nothing_looked_at() -> None:
    marks, pages = Marks(16), table(3, 5, 4, 6)
    assert Trail(marks).computed(table(3, HOLE, 4, 6), TEXT[:30]) == (2, 16)
    trail = known(marks, pages, TEXT[:30])
    pages.punch(1, 2)
    assert trail.computed(pages, TEXT[:30]) == (0, 30)


def test_whatever_happens_to_frames_only_what_is_there_is_believed() -> None:
    """Against a memory that is written as a model would."""
    rng = random.Random(1)
    marks, memory = Marks(12), [[0] * FRAME for _ in range(12)]
    texts = [[*TEXT[:shared], *(rng.randrange(1000) for _ in range(48 - shared))] for shared in (0, 8, 16, 24, 24)]
    trails, tables = [Trail(marks) for _ in texts], [table(*range(n, n + 6)) for n in range(len(texts))]
    lengths = [9] * len(texts)
    believed = 0
    for _ in range(4000):
        n = rng.randrange(len(texts))
        if rng.random() < 0.1:  # preempted
            tables[n] = table(*rng.sample(range(12), 6))
        if rng.random() < 0.1:  # another sequence that begins alike
            trails[n], tables[n], lengths[n] = Trail(marks), table(*rng.sample(range(12), 6)), 9
        lengths[n] = min(40, lengths[n] + rng.randrange(4))
        tokens = texts[n][: lengths[n]]
        blind, computed = trails[n].computed(tables[n], tokens)
        frames = tables[n].frames(0, 6)
        assert blind == 0
        assert [memory[frames[p // FRAME]][p % FRAME] for p in range(computed)] == [hash(tuple(tokens[: p + 1])) for p in range(computed)]
        believed += computed
        written = [*tokens, *(rng.choice((rng.randrange(1000), texts[n][len(tokens) + i])) for i in range(rng.randrange(5)))]
        for p in range(computed, len(written)):
            memory[frames[p // FRAME]][p % FRAME] = hash(tuple(written[: p + 1]))
        trails[n].note(tokens, computed, written[computed:])
    assert believed > 4000, "little was ever found"


def test_confidence_follows_what_came() -> None:
    confidence = Confidence()
    assert confidence.rate(Confidence.class_of(0.95)) > 0.9 > confidence.rate(Confidence.class_of(0.45))
    for number in range(1000):
        confidence.note(9, number % 2 == 0)
    assert 0.4 < confidence.rate(9) < 0.6
    assert [Confidence.class_of(p) for p in (0.0, 0.999, 1.0)] == [0, CLASSES - 1, CLASSES - 1]
