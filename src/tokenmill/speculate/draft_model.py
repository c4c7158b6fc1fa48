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
from tokenmill.speculate.costs import KEPT, StepCosts, average
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.proposer import Best, Wish, Worth
from tokenmill.speculate.trail import Marks, Trail

F32 = npt.NDArray[np.float32]

EXPECTED = 128
"""Tokens that a sequence is expected to put out at least, if it may. Beyond that, as many as it has."""

SHORT = 16
"""Tokens that are caught up with whatever it costs; rows by which the cost of catching up is judged before it is known."""

RETURN = 4.0
"""What a text takes to read must be expected to be saved so many times: it is certain, and what drafts save is not."""

BEHIND = 2
"""Tokens that the model has not seen when it begins to draft, as a rule: the last one that was accepted, and the one that came with it."""

FIRST_RATE = 0.7
"""Share of drafted tokens that is expected to be right before anything is known."""

MEMORY = 32.0
"""Drafted tokens that a share is an average of, about."""

OPEN_MINDED = 16
"""Each time after so many sequences, one is expected to be drafted for as well as if nothing were known."""


class Writing:
    """A sequence that gets a draft.

    pages: what the model looks at. fresh: where what is to be computed begins. computed: tokens from there on whose keys and values
    are there. tokens, kinds, logits: drawn so far, how sure they are, and what from. chance: that all of them are right. ended: there
    is nothing to draw any more.
    """

    def __init__(self, wish: Wish, known: Known, table: PageTable) -> None:
        blind, computed = known.trail.computed(table, wish.token_ids)
        self.wish = wish
        self.known = known
        self.pages = _pages(table, blind)
        self.fresh = min(computed, len(wish.token_ids) - 1)
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self.computed: list[int] = []
        self.logits: list[F32] = []
        self.chance = 1.0
        self.ended = False

    @property
    def left(self) -> int:
        """Tokens that the draft may get yet."""
        return 0 if self.ended else self.wish.most - len(self.tokens)

    @property
    def position(self) -> int:
        """Of the next token of the draft."""
        return len(self.wish.token_ids) + len(self.tokens)

    def odds(self, rate: float) -> list[float]:
        """Of what the draft may get yet, of tokens that are right so often."""
        return [self.chance * rate] + [rate] * (self.left - 1) if self.left else []

    def add(self, token: int, kind: int, rate: float) -> None:
        """One more token, right so often; it is observed until `take_back`."""
        assert self.wish.state is not None, "a draft model draws as the sequence is sampled"
        self.wish.state.observe(token)
        self.tokens.append(token)
        self.kinds.append(kind)
        self.chance *= rate
        self.ended = token in self.wish.ends

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
    """A sequence between its drafts. kinds, tokens: the draft for the positions from `start` on, to be held against what comes. rate:
    share of its drafted tokens that are right. follows: whether the model has begun to catch up with it."""

    def __init__(self, trail: Trail, rate: float) -> None:
        self.trail = trail
        self.rate = rate
        self.start = 0
        self.tokens: list[int] = []
        self.kinds: list[int] = []
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
        self._n_begun = 0
        self._costs = StepCosts()  # of drafting, by rows
        self._row_seconds: float | None = None  # of catching up with one
        self._invested = 0.0
        self._idle = 0  # steps in which drafts were wanted and none was tried

    @property
    def invested(self) -> float:
        return self._invested

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        self._invested = 0.0
        drafts = sum(wish.most > 0 for wish in wishes)
        writings = [self._begin(wish, worth, drafts) for wish in wishes]
        going = self._catch_up([writing for writing in writings if writing is not None][: self._most], worth)
        going = self._paying(going, worth)
        self._doubt(tried=bool(going), wanted=any(wish.most for wish in wishes))
        try:
            while going:
                worth = self._extend(going, worth)
                going = self._paying(going, worth)
        finally:  # a step that fails is planned again, from states as they were
            for writing in filter(None, writings):
                writing.take_back()
        return [Draft() if writing is None else self._end(writing) for writing in writings]

    def outlook(self, wish: Wish, worth: Worth) -> float:
        """Seconds that a draft is expected to save."""
        return self._best([self._meet(wish.key).rate] * wish.most, worth, worth.rows, BEHIND * worth.rows).saved

    def forget(self, key: Hashable) -> None:
        self._known.pop(key, None)

    def _doubt(self, tried: bool, wanted: bool) -> None:
        """What drafting is thought to cost is not believed for good: who is too dear is not tried, and nothing new is learnt."""
        self._idle = 0 if tried else self._idle + wanted
        if self._idle == KEPT:
            self._costs, self._row_seconds, self._idle = StepCosts(), None, 0

    def _meet(self, key: Hashable) -> Known:
        known = self._known.get(key)
        if known is None:
            rate = self._rate if self._n_begun % OPEN_MINDED else max(self._rate, FIRST_RATE)
            self._n_begun += 1
            known = self._known[key] = Known(Trail(self._marks), rate)
        return known

    def _begin(self, wish: Wish, worth: Worth, drafts: int) -> Writing | None:
        """None: no draft in this step, because it is not wanted or would not pay."""
        known = self._meet(wish.key)
        self._learn(known, wish.token_ids)
        if not wish.most or self._best([known.rate] * wish.most, worth, drafts, BEHIND * drafts).saved <= 0:
            return None
        return Writing(wish, known, self._kv.tables(wish.key)[self._group])

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
            elif self._follows(writing, missing, worth, len(writings)):
                behind.append(writing)
        for writing in behind:
            wish, start = writing.wish, writing.fresh
            part = wish.token_ids[start : min(start + room, len(wish.token_ids) - 1)]
            if part:
                begun = time.monotonic()
                self._tape.run(Batch(array("i", part), [Segment(0, len(part), start, (writing.pages,))], array("i")))
                seconds = time.monotonic() - begun
                self._row_seconds = average(self._row_seconds, seconds / len(part))
                self._invested += seconds
                writing.known.trail.note(wish.token_ids, start, part)
                room -= len(part)
        return ready

    def _follows(self, writing: Writing, missing: int, worth: Worth, drafts: int) -> bool:
        """Whether it catches up, as it does where what drafts are expected to save is more; what is begun is brought to its end."""
        wish, known = writing.wish, writing.known
        if not known.follows:
            expected = min(wish.left, max(EXPECTED, len(wish.token_ids) - wish.prompt_len))
            best = self._best(writing.odds(known.rate), worth, drafts, BEHIND * drafts)
            row_seconds = self._row_seconds or self._share * worth.row(SHORT)
            known.follows = RETURN * missing * row_seconds <= expected / best.tokens * best.saved
        return known.follows

    def _best(self, odds: Sequence[float], worth: Worth, drafts: int, rows: int) -> Best:
        """Of a draft with these odds, beside others like it. rows: that the model computes for the next token of all of them."""
        seconds = self._costs.seconds(rows) if self._costs.known else self._share * worth.seconds(rows)
        return worth.best(odds, seconds / drafts, drafts)

    def _paying(self, writings: list[Writing], worth: Worth) -> list[Writing]:
        """Those for which more of a draft pays beside the others: with fewer, each bears more of what it costs."""
        while True:
            drafts, rows = len(writings), sum(len(writing.rows) for writing in writings)
            left = [one for one in writings if self._best(one.odds(one.known.rate), worth, drafts, rows).saved > 0]
            if len(left) == drafts:
                return left
            writings = left

    def _extend(self, writings: list[Writing], worth: Worth) -> Worth:
        """One more token for each; returns what the step is worth with them."""
        begun, rows = time.monotonic(), sum(len(writing.rows) for writing in writings)
        logits = self._run(writings)
        tokens, kinds = self._draw(logits, writings)
        gained = 0.0
        for writing, token, kind, row in zip(writings, tokens, kinds, logits, strict=True):
            if token == NO_TOKEN:
                writing.ended = True
                continue
            if self._rejects:
                writing.logits.append(row.copy())
            writing.add(token, kind, self._confidence.rate(kind))
            gained += writing.chance
        seconds = time.monotonic() - begun
        self._costs.observe(rows, seconds)
        return Worth(worth.rows + len(writings), worth.tokens + gained, worth.seconds, worth.spent + seconds)

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
        sure = [np.exp(answer.top[0][1]) if token != NO_TOKEN else 0.0 for token, answer in zip(tokens, best, strict=True)]
        return tokens, [Confidence.class_of(float(probability)) for probability in sure]

    def _end(self, writing: Writing) -> Draft:
        wish, known = writing.wish, writing.known
        if writing.computed:
            known.trail.note(wish.token_ids, writing.fresh, writing.computed)
        known.start, known.tokens, known.kinds = len(wish.token_ids), writing.tokens, writing.kinds
        odds = tuple(map(self._confidence.rate, writing.kinds))
        return Draft(tuple(writing.tokens), odds, np.array(writing.logits) if writing.logits else None)


def _pages(table: PageTable, blind: int) -> Pages:
    """Of a table, but for its first frames."""
    if not blind:
        return Pages(table.first, table.starts)
    hidden = PageTable()
    hidden.append(HOLE, blind)
    for extent in table.extents(blind, table.n_frames):
        hidden.append(*extent)
    return Pages(hidden.first, hidden.starts)
