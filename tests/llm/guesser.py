"""A proposer for tests, which knows how answers go on and is wrong now and then."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from tokenmill.speculate.draft import Draft
from tokenmill.speculate.proposer import Wish, Worth
from tokenmill.speculate.speculator import Speculator

WRONG_EVERY = 7
"""Positions, of which the last is guessed wrong."""


class Guesser:
    """texts: prompts with their answers, as token ids. Guesses what follows in the first that begins like the sequence."""

    name = "guesser"
    writes = False
    invested = 0.0

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        return [self._guess(wish.token_ids, wish.most) for wish in wishes]

    def forget(self, key: Hashable) -> None:
        """Nothing is kept."""

    def _guess(self, so_far: list[int], most: int) -> Draft:
        at = len(so_far)
        follows = next((text[at : at + most] for text in self.texts if text[:at] == so_far), [])
        tokens = [token ^ 1 if (at + i) % WRONG_EVERY == 0 else token for i, token in enumerate(follows)]
        return Draft(tuple(tokens), (1.0,) * len(tokens))


class FreeRows:
    """Step costs by which every draft pays in full."""

    known = True

    def seconds(self, rows: int) -> float:
        return 1.0

    def observe(self, rows: int, seconds: float, weight: float = 0.0) -> None:
        """What is measured changes nothing."""

    def note_plain(self) -> None:
        """Nothing is forgotten."""


def engines_guess_by(guesser: Guesser, patch: pytest.MonkeyPatch, most: int = 8) -> None:
    """Engines that are built from here on draft what `guesser` says, all of it in every step, however long steps take."""
    patch.setattr("tokenmill.speculate.speculator.StepCosts", FreeRows)
    patch.setattr("tokenmill.speculate.speculator.Checks.due", False)
    patch.setattr("tokenmill.engine.build.build_speculator", lambda *parts: Speculator(guesser, most, 0.0))
