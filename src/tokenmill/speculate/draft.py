"""What a proposer gives."""

from __future__ import annotations

from typing import NamedTuple


class Draft(NamedTuple):
    """Tokens for the positions after a sequence's newest one; as many odds.

    odds: the estimated probability that each is right, given that those before it are.
    """

    tokens: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()
