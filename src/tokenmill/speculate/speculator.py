"""Drafts for the sequences of a step, and what their verification teaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import Speculation
from tokenmill.sampling.state import SamplerState
from tokenmill.scheduler.scheduler import Step
from tokenmill.scheduler.sequence import Sequence
from tokenmill.speculate.balance import Balance
from tokenmill.speculate.checks import Checks
from tokenmill.speculate.costs import CHECK, WEIGHT, StepCosts
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.lengths import choose_lengths
from tokenmill.speculate.proposer import Proposer, Wish, Worth

MARGIN = 0.06
"""Drafts must promise so much more tokens per second than none do: those that are chosen for what they promise keep a little less."""

IDLE = 0.01
"""Share of a step's time that looking for a draft in vain may take without counting as an attempt."""

MEMORY = 0.97
"""What a step leaves of earlier experience with a sequence's drafts: some thirty steps count."""

ENOUGH = 8.0
"""Drafted tokens that must have been tried before a sequence gets no more of them."""


@dataclass(slots=True)
class Record:
    """Of a sequence's drafted tokens whose predecessors were right: how many were tried, and right. Both fade, so that a sequence
    that gets no more drafts is tried again some time."""

    tried: float = 0.0
    right: float = 0.0

    def fails(self, threshold: float) -> bool:
        return self.tried >= ENOUGH and self.right < threshold * self.tried

    def fade(self) -> None:
        self.tried *= MEMORY
        self.right *= MEMORY

    def add(self, length: int, accepted: int) -> None:
        self.tried += min(accepted + 1, length)
        self.right += accepted


class Drawing(Protocol):
    """How a sequence goes on: how it is sampled, and the tokens that end it."""

    @property
    def sampler(self) -> SamplerState: ...
    @property
    def ends(self) -> frozenset[int]: ...


class Speculator:
    """Asks one proposer, and gives each sequence as much of its draft as pays.

    most: tokens of a draft at most. threshold: share of drafted tokens that must be right for a sequence to get more of them. rejects:
    whether drafts are to be verified by rejection.
    total: what was drafted since the start. drafts: those of this step that are not empty. costs, checks, balance, margin: what
    drafts are judged by; a measurement that wants drafts whatever they are worth puts others in their place for a while.
    """

    def __init__(self, proposer: Proposer, most: int, threshold: float, rejects: bool = False) -> None:
        self.total = Speculation()
        self.drafts: dict[Sequence, Draft] = {}
        self.costs = StepCosts()
        self.checks = Checks()
        self.balance = Balance()
        self.margin = MARGIN
        self.rejects = rejects
        self._proposer = proposer
        self._most = most
        self._threshold = threshold
        self._drafting = 0.0  # seconds before this step, but for what was invested
        self._records: dict[Sequence, Record] = {}

    @property
    def name(self) -> str:
        """The proposer's."""
        return self._proposer.name

    @property
    def proposals(self) -> dict[Sequence, npt.NDArray[np.float32]]:
        """What the tokens of this step's drafts were drawn from, where they were drawn."""
        return {sequence: draft.logits for sequence, draft in self.drafts.items() if draft.logits is not None}

    def draft(self, drawings: Mapping[Sequence, Drawing], sequences: Ordered[Sequence], lend: Callable[[Sequence, int], int]) -> None:
        """Give each a draft, maybe an empty one. They have only their newest token to compute; nothing is in flight.

        drawings: of these sequences, and maybe of others. lend: gets a sequence frames for so many tokens of a draft, and says for
        how many.
        """
        self.drafts.clear()
        rows, seconds = len(sequences), self.costs.seconds
        if not rows or not self.costs.known:
            return
        begun = time.monotonic()
        rests = self.balance.rests() or self.checks.due
        rooms = [0 if rests else self._room(s) for s in sequences]
        if self._proposer.writes:
            rooms = [lend(s, room) if room else 0 for s, room in zip(sequences, rooms, strict=True)]
        wishes = [self._wish(s, room, drawings[s]) for s, room in zip(sequences, rooms, strict=True)]
        found = self._proposer.propose(wishes, Worth(rows, float(rows), seconds))
        drafts = [_ended(draft, wish.ends) for wish, draft in zip(wishes, found, strict=True)]
        spent = time.monotonic() - begun - self._proposer.invested
        lengths = choose_lengths([draft.odds for draft in drafts], rows, lambda rows: spent + seconds(rows), self.margin)
        for sequence, draft, length in zip(sequences, drafts, lengths, strict=True):
            given = draft.first(lend(sequence, length) if length else 0)
            sequence.draft = given.tokens
            if given.tokens:
                self.drafts[sequence] = given
        self._drafting = time.monotonic() - begun - self._proposer.invested

    def learn(self, step: Step, tokens: Mapping[Sequence, Ordered[int]], seconds: float) -> None:
        """The step took `seconds`. tokens: what came out of it for each sequence that is still there."""
        if all(work.samples and work.n_tokens == 1 for work in step):
            drafted = sum(len(work.draft) for work in step)
            believed = self.costs.seconds(len(step)) if self.costs.known else seconds
            self.costs.observe(len(step) + drafted, seconds, CHECK if self.checks.due and not drafted else WEIGHT)
            if drafted:
                self.checks.note_drafts()
            else:
                self.costs.note_plain()
                self.checks.note_plain(believed, seconds)
            given = [len(tokens[work.sequence]) for work in step if work.sequence in tokens]
            if given and (drafted or self._drafting > IDLE * seconds):  # of those that have gone meanwhile nothing is known
                self.balance.note(self._drafting + seconds, fmean(given) * self.costs.seconds(len(step)))
        self._drafting = 0.0
        for work in step:
            if not work.samples or work.sequence not in tokens:
                continue
            record = self._records.setdefault(work.sequence, Record())
            record.fade()
            if work.draft:
                accepted = len(tokens[work.sequence]) - 1
                record.add(len(work.draft), accepted)
                self.total.add(len(work.draft), accepted)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._proposer.forget(sequence.id)
        self._records.pop(sequence, None)
        self.drafts.pop(sequence, None)

    def _wish(self, sequence: Sequence, room: int, drawing: Drawing) -> Wish:
        return Wish(
            key=sequence.id,
            token_ids=sequence.token_ids,
            prompt_len=sequence.prompt_len,
            most=room,
            left=sequence.draft_room,
            namespace=sequence.cache_salt,
            state=drawing.sampler,
            ends=drawing.ends,
        )

    def _room(self, sequence: Sequence) -> int:
        record = self._records.get(sequence)
        if record is not None and record.fails(self._threshold):
            return 0
        return min(self._most, sequence.draft_room)


def _ended(draft: Draft, ends: frozenset[int]) -> Draft:
    """Up to the first token that would end the sequence."""
    for at, token in enumerate(draft.tokens, 1):
        if token in ends:
            return draft.first(at)
    return draft
