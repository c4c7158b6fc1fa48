"""How far to trust a match of a certain length: measured on drafts and on what came where they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LONGEST = 32
"""Tokens of a context that are looked at; longer matches count as this long."""

_F64 = npt.NDArray[np.float64]

_FIRST = (0.0, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95, 0.95)
"""Trust before anything is known, by class of lengths: 0, 1, 2, 3, 4-7, 8-15, 16-31, 32."""
_KNOWN = 8.0
"""Tokens' worth of evidence that a sequence starts with, taken from those before it."""
_MEMORY = 64.0
"""Evidence is halved when it comes to that many tokens, so that the newest counts most."""


def _class_of(length: int) -> int:
    return length if length < 4 else length.bit_length() + 1


_LENGTHS = [slice(n, n + 1) for n in range(4)] + [slice(4, 8), slice(8, 16), slice(16, 32), slice(32, LONGEST + 1)]
"""By class."""


class Promise(NamedTuple):
    """A token of a draft. match: tokens of the context that it rests on. share: of all that followed these, how much was this token."""

    token: int
    match: int
    share: float


class Odds:
    """By class of lengths: how many tokens came true of those that were promised, each counted by its share."""

    def __init__(self, rates: Sequence[float] = _FIRST) -> None:
        self._promised = [_KNOWN] * len(rates)
        self._kept = [rate * _KNOWN for rate in rates]

    @property
    def rates(self) -> list[float]:
        """By class, at most 1."""
        return [min(kept / promised, 1.0) for kept, promised in zip(self._kept, self._promised, strict=True)]

    def note(self, promise: Promise, kept: bool) -> float:
        """Returns the rate of its class."""
        kind = _class_of(promise.match)
        if self._promised[kind] >= _MEMORY:
            self._promised[kind] /= 2
            self._kept[kind] /= 2
        self._promised[kind] += promise.share
        self._kept[kind] += kept
        return min(self._kept[kind] / self._promised[kind], 1.0)


class Track:
    """One sequence's odds, and its newest draft, which is checked once it is known what came. Tells `common` too.

    trust: float64 [LONGEST + 1], by length of the match.
    """

    def __init__(self, common: Odds) -> None:
        rates = common.rates
        self._own, self._common = Odds(rates), common
        self._start = 0
        self._draft: Sequence[Promise] = ()
        self.trust: _F64 = np.array([rates[_class_of(length)] for length in range(LONGEST + 1)])

    def promise(self, start: int, draft: Sequence[Promise]) -> None:
        """draft: for the positions from `start` on."""
        self._start, self._draft = start, draft

    def check(self, token_ids: Sequence[int]) -> None:
        """Learn from the draft as far as `token_ids` reach, up to its first token that was wrong."""
        for promise, token in zip(self._draft, token_ids[self._start : self._start + len(self._draft)], strict=False):
            kept = promise.token == token
            self._common.note(promise, kept)
            self.trust[_LENGTHS[_class_of(promise.match)]] = self._own.note(promise, kept)
            if not kept:
                break
        if len(token_ids) > self._start:
            self._draft = ()
