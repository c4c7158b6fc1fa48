"""The interface of all proposers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from tokenmill.speculate.draft import Draft


class Wish(NamedTuple):
    """A sequence that could use a draft.

    token_ids: prompt and output so far; for one key it only ever grows. Not copied, never changed. prompt_len: of these, the prompt's.
    most: tokens of the draft at most; with 0 the proposer only learns.
    namespace: sequences of other namespaces never see what this one has put out.
    """

    key: Hashable
    token_ids: list[int]
    prompt_len: int
    most: int
    namespace: str = ""


class Proposer(Protocol):
    """Keeps what it needs of every sequence, and catches up with its tokens when asked.

    The same calls in the same order give the same drafts. Whatever the drafts, the output is the same.
    """

    @property
    def name(self) -> str: ...

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """One draft per wish; an empty one where nothing is likely enough."""
        ...

    def forget(self, key: Hashable) -> None:
        """The sequence is over. A key that is not known is ignored."""
        ...
