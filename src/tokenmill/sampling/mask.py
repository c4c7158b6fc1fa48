"""What a grammar is to the sampler: a set of tokens that may come next, which each token changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
"""A bit for each token, bit t % 32 of word t // 32: whether it is allowed. There may be more bits than tokens."""


class Mask(Protocol):
    """The tokens that may follow those observed so far."""

    def allowed(self) -> Words:
        """[words]; may change with the next call of anything. Only at the end of a sequence may it be empty."""
        ...

    def observe(self, token: int) -> None:
        """It came; it was allowed."""
        ...

    def retract(self, token: int) -> None:
        """Take back the latest `observe(token)`."""
        ...


def allowed_along(mask: Mask, draft: Sequence[int]) -> Words:
    """What is allowed in place of each token of a draft, and behind it: [tokens + 1, words].

    Rows behind a token that is not allowed say nothing: it will not stand. The mask is as before afterwards.
    """
    first = mask.allowed()
    rows = np.full((len(draft) + 1, len(first)), 0xFFFFFFFF, np.uint32)
    rows[0] = first
    seen = 0
    for token in draft:
        if not rows[seen, token // 32] >> (token % 32) & 1:
            break
        mask.observe(token)
        seen += 1
        rows[seen] = mask.allowed()
    for token in reversed(draft[:seen]):
        mask.retract(token)
    return rows
