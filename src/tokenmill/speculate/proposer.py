"""What a proposer is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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


class Worth(NamedTuple):
    """What tokens are worth in a step. token: seconds that one takes without drafts. row: seconds for one more row."""

    token: float
    row: float

    def floor(self, drafting: float = 0.0) -> float:
        """The probability of being reached and right below which a token does not pay. drafting: seconds that it takes to draft it."""
        return (self.row + drafting) / self.token


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

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        """One draft per wish; an empty one where nothing is likely enough to pay."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence is over. A key that is not known is ignored."""
        ...
