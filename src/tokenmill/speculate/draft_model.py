"""A smaller model of the same vocabulary drafts, token by token.

Its keys and values lie in memory of its own, in frames of the same numbers as the target's: it goes by the target's page tables, so
that a frame that is shared, cached or given back is so for both. A prefix hit is one for the draft model too, if it had come that far.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.kv.manager import KVManager
from tokenmill.kv.table import HOLE, PageTable
from tokenmill.sampling.sampler import NO_TOKEN, PROPOSING, Draw, Question, Sampler
from tokenmill.speculate.confidence import Confidence
from tokenmill.speculate.costs import average
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.lengths import gain
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.speculate.trail import Marks, Trail

F32 = npt.NDArray[np.float32]

GAIN = 0.2
"""Share of its time that a sequence is expected to save: to catch up with its text may cost that much of what is expected to come."""

EXPECTED = 128
"""Tokens that a sequence is expected to put out at least, if it may. Beyond that, as many as it has."""

SHORT = 16
"""Tokens that are caught up with whatever it costs."""

FIRST_RATE = 0.7
"""Share of drafted tokens that is expected to be right before anything is known."""

MEMORY = 32.0
"""Drafted tokens that a share is an average of, about."""

LONGEST_BREAK = 64
"""Steps at most for which a sequence is left alone when its drafts did not pay."""


class Writing:
    """A sequence that gets a draft.

    pages: what the model looks at. fresh: where what is to be computed begins. computed: tokens from there on whose keys and values
    are there. tokens, kinds, logits: drawn so far, how sure they are, and what from. worth: how many of them pay.
    """

    def __init__(self, wish: Wish, trail: Trail, table: PageTable) -> None:
        blind, computed = trail.computed(table, wish.token_ids)
        self.wish = wish
        self.trail = trail
        self.pages = _pages(table, blind)
        self.fresh = min(computed, len(wish.token_ids) - 1)
        self.worth = 0
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self.computed: list[int] = []
        self.logits: list[F32] = []
        self.chance = 1.0

    @property
    def position(self) -> int:
        """Of the next token of the draft."""
        return len(self.wish.token_ids) + len(self.tokens)

    def add(self, token: int, kind: int) -> None:
        """One more token; it is observed until `take_back`."""
        assert self.wish.state is not None, "a draft model draws as the sequence is sampled"
        self.wish.state.observe(token)
        self.tokens.append(token)
        self.kinds.append(kind)

    def take_back(self) -> None:
        """The sequence has not put out what was drafted."""
        for token in reversed(self.tokens):
            assert self.wish.state is not None, "who draws has a state"
            self.wish.state.retract(token)

    @property
    def rows(self) -> list[int]:
        """What is not computed yet."""
        if self.computed:
            return self.tokens[-1:]
        return self.wish.token_ids[self.fresh :]


class Known:
    """A sequence between its drafts. kinds, tokens: the draft for the positions from `start` on, to be held against what comes. rest:
    steps for which it is left alone yet; rested: how many those were at first. rate: share of its drafted tokens that are right.
    follows: whether the model has begun to catch up with it."""

    def __init__(self, trail: Trail, rate: float) -> None:
        self.trail = trail
        self.rate = rate
        self.start = 0
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self.rest = self.rested = 0
        self.follows = False


class DraftModel:
    """Drafts with a tape whose pool has as many frames as the target's.

    group: of the target, whose page tables it goes by. rows: the most positions that it computes at a time; with a longer text it
    catches up in several steps, and there is no draft until then. most: sequences at a time. share: of the target's weights that its
    own are. rejects: drafts are verified by rejection, so that it draws with noise of its own and says what from.
    """

    name = "draft"
    writes = True

    def __init__(self, tape: Tape, kv: KVManager, sampler: Sampler, group: int, rows: int, most: int, share: float, rejects: bool) -> None:
        self._tape = tape
        self._kv = kv
        self._sampler = sampler
        self._group = group
        self._rows = rows
        self._most = most
        self._share = share
        self._rejects = rejects
        self._marks = Marks(kv.n_frames)
        self._known: dict[Hashable, Known] = {}
        self._confidence = Confidence()
        self._rate = FIRST_RATE
        self._token_seconds: float | None = None  # of drafting one
        self._row_seconds: float | None = None  # of catching up with one

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        writings = [self._begin(wish) for wish in wishes]
        left = self._catch_up([writing for writing in writings if writing is not None][: self._most], worth)
        floor = worth.floor(self._token_seconds or 0.0)
        try:
            while left:
                left = self._extend(left, floor)
        finally:  # a step that fails is planned again, from states as they were
            for writing in filter(None, writings):
                writing.take_back()
        return [Draft() if writing is None else self._end(writing) for writing in writings]

    def outlook(self, wish: Wish, worth: Worth) -> float:
        """Tokens that a draft is expected to gain, beyond those that its time would give without."""
        known = self._known.get(wish.key)
        if known is not None and known.rest:
            return 0.0
        return gain([self._rate if known is None else known.rate] * wish.most, worth, self._token_seconds or 0.0)

    def forget(self, key: Hashable) -> None:
        self._known.pop(key, None)

    def _begin(self, wish: Wish) -> Writing | None:
        """None: no draft in this step."""
        known = self._known.get(wish.key)
        if known is None:
            known = self._known[wish.key] = Known(Trail(self._marks), self._rate)
        self._learn(known, wish.token_ids)
        if known.rest:
            known.rest -= 1
            return None
        if wish.most == 0:
            return None
        return Writing(wish, known.trail, self._kv.tables(wish.key)[self._group])

    def _learn(self, known: Known, token_ids: Sequence[int]) -> None:
        """Hold the last draft against what came."""
        for drafted, kind, token in zip(known.tokens, known.kinds, token_ids[known.start : known.start + len(known.tokens)], strict=False):
            right = drafted == token
            self._confidence.note(kind, right)
            self._rate += (right - self._rate) / MEMORY
            known.rate += (right - known.rate) / MEMORY
            if not right:
                break
        known.tokens, known.kinds = [], []

    def _catch_up(self, writings: list[Writing], worth: Worth) -> list[Writing]:
        """Those that can draft. With others the model goes a part of the way, if that is likely to be worth it."""
        ready = []
        room = self._rows
        behind: list[Writing] = []
        for writing in writings:
            missing = len(writing.wish.token_ids) - writing.fresh
            if missing <= min(SHORT, room):
                ready.append(writing)
                room -= missing
            elif self._follows(writing.wish, missing, worth):
                behind.append(writing)
        for writing in behind:
            wish, start = writing.wish, writing.fresh
            part = wish.token_ids[start : min(start + room, len(wish.token_ids) - 1)]
            if part:
                begun = time.monotonic()
                self._tape.run(Batch(array("i", part), [Segment(0, len(part), start, (writing.pages,))], array("i")))
                self._row_seconds = average(self._row_seconds, (time.monotonic() - begun) / len(part))
                writing.trail.note(wish.token_ids, start, part)
                room -= len(part)
        return ready

    def _follows(self, wish: Wish, missing: int, worth: Worth) -> bool:
        """Whether it catches up: what is begun is brought to its end."""
        known = self._known[wish.key]
        if not known.follows:
            expected = min(wish.left, max(EXPECTED, len(wish.token_ids) - wish.prompt_len))
            known.follows = missing * (self._row_seconds or self._share * worth.row) <= GAIN * expected * worth.token
        return known.follows

    def _extend(self, writings: list[Writing], floor: float) -> list[Writing]:
        """One more token for each; returns those whose draft goes on."""
        begun = time.monotonic()
        logits = self._run(writings)
        tokens, kinds = self._draw(logits, writings)
        going = []
        for writing, token, kind, row in zip(writings, tokens, kinds, logits, strict=True):
            if token == NO_TOKEN:
                continue
            if self._rejects:
                writing.logits.append(row.copy())
            writing.add(token, kind)
            writing.chance *= self._confidence.rate(kind)
            if writing.chance < floor:
                continue
            writing.worth += 1
            if writing.worth < writing.wish.most and token not in writing.wish.ends:
                going.append(writing)
        self._token_seconds = average(self._token_seconds, (time.monotonic() - begun) / len(writings))
        return going

    def _run(self, writings: list[Writing]) -> F32:
        """Compute what each has not computed yet. Logits of the last row of each, float32 [writings, vocabulary]."""
        tokens, outputs, segments = array("i"), array("i"), []
        for writing in writings:
            rows = writing.rows
            segments.append(Segment(len(tokens), len(rows), writing.fresh + len(writing.computed), (writing.pages,)))
            tokens.extend(rows)
            outputs.append(len(tokens) - 1)
            writing.computed += rows
        return self._tape.run(Batch(tokens, segments, outputs))

    def _draw(self, logits: F32, writings: list[Writing]) -> tuple[list[int], list[int]]:
        """A token for each, and how sure it is: by the likeliest token's probability, so that it says nothing of which one was drawn."""
        draws = []
        for row, writing in enumerate(writings):
            assert writing.wish.state is not None, "a draft model draws as the sequence is sampled"
            draws.append(Draw(row, writing.wish.state, writing.position))
        tokens = [drawn[0] for drawn in self._sampler.sample(logits, draws, PROPOSING if self._rejects else 0)]
        best = self._sampler.likelihoods(logits, [Question(row, 0, 1) for row in range(len(writings))])
        return tokens, [Confidence.class_of(float(np.exp(answer.top[0][1]))) for answer in best]

    def _end(self, writing: Writing) -> Draft:
        wish, known = writing.wish, self._known[writing.wish.key]
        if writing.computed:
            writing.trail.note(wish.token_ids, writing.fresh, writing.computed)
            known.rested = 0 if writing.worth else min(LONGEST_BREAK, max(2, 2 * known.rested))
            known.rest = known.rested
        known.start, known.tokens, known.kinds = len(wish.token_ids), writing.tokens, writing.kinds
        odds = tuple(map(self._confidence.rate, writing.kinds))
        return Draft(tuple(writing.tokens), odds, np.array(writing.logits) if writing.logits else None).first(writing.worth)


def _pages(table: PageTable, blind: int) -> Pages:
    """Of a table, but for its first frames."""
    if not blind:
        return Pages(table.first, table.starts)
    hidden = PageTable()
    hidden.append(HOLE, blind)
    for extent in table.extents(blind, table.n_frames):
        hidden.append(*extent)
    return Pages(hidden.first, hidden.starts)
