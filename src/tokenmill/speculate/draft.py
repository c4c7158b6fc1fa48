"""What a proposer gives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Draft(NamedTuple):
    """Tokens for the positions after a sequence's newest one; as many odds.

    odds: the estimated probability that each is right, given that those before it are.
    logits: what each was drawn from, float32 [tokens, vocabulary], for verification by rejection; None of what was not drawn.
    """

    tokens: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()
    logits: npt.NDArray[np.float32] | None = None

    def first(self, count: int) -> Draft:
        """Its first tokens."""
        return Draft(self.tokens[:count], self.odds[:count], None if self.logits is None else self.logits[:count])
