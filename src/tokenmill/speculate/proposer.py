"""What a proposer is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

from tokenmill.sampling.state import SamplerState
from tokenmill.speculate.draft import Draft


class Wish(NamedTuple):
    """A sequence that could use a draft.

    token_ids: prompt and output so far; for one key it only ever grows. Not copied, never changed. prompt_len: of these, the prompt's.
    most: tokens of the draft at most; with 0 the proposer only learns.
    namespace: sequences of other namespaces never see what this one has put out.
    left: tokens that the sequence may put out yet.
    state: how the sequence is sampled, for proposers that draw; None where there is none. ends: tokens that would end it.
    """

    key: Hashable
    token_ids: list[int]
    prompt_len: int
    most: int
    namespace: str = ""
    left: int = 0
    state: SamplerState | None = None
    ends: frozenset[int] = frozenset()


class Best(NamedTuple):
    """What the best part of a draft does. saved: seconds. tokens: that the sequence is expected to get, with the one that it gets
    anyway."""

    saved: float
    tokens: float


class Worth(NamedTuple):
    """A step that is drafted for. rows: that it has so far. tokens: that it is expected to give. seconds: of a step by its rows. spent:
    seconds, on drafts."""

    rows: int
    tokens: float
    seconds: Callable[[int], float]
    spent: float = 0.0

    @property
    def token(self) -> float:
        """Seconds that one takes."""
        return (self.spent + self.seconds(self.rows)) / self.tokens

    def row(self, more: int) -> float:
        """Seconds for each of so many more rows."""
        return (self.seconds(self.rows + more) - self.seconds(self.rows)) / more

    def floor(self, most: int) -> float:
        """The probability of being reached and right below which no token of drafts of up to `most` pays."""
        return max(0.0, min(map(self.row, range(1, most + 1)), default=0.0) / self.token)

    def best(self, odds: Sequence[float], drafting: float = 0.0, drafts: int = 1) -> Best:
        """Of a draft. drafting: seconds per drafted token. drafts: that are like it in this step."""
        found = Best(0.0, 1.0)
        expected, chance = 0.0, 1.0
        for length, each in enumerate(odds, 1):
            chance *= each
            expected += chance
            saved = expected * self.token - length * (self.row(drafts * length) + drafting)
            if saved > found.saved:
                found = Best(saved, 1 + expected)
        return found


class Proposer(Protocol):
    """Keeps what it needs of every sequence, and catches up with its tokens when asked.

    The same calls in the same order give the same drafts. Whatever the drafts, the output is the same.
    """

    @property
    def name(self) -> str: ...

    @property
    def writes(self) -> bool:
        """Whether it needs frames to draft."""
        ...

    @property
    def invested(self) -> float:
        """Seconds of the last `propose` that went into reading text for the sake of later drafts: a cost of those, not of this step."""
        ...

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        """One draft per wish; an empty one where nothing is likely enough to pay."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence is over. A key that is not known is ignored."""
        ...
