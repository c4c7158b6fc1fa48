"""How often a draft model's tokens are right, by how likely it holds its likeliest one."""

from __future__ import annotations

CLASSES = 10
_KNOWN = 4.0
"""Tokens' worth of belief that it is right as often as it thinks."""
_MEMORY = 256.0
"""Evidence is halved when it comes to that many tokens, so that the newest counts most."""


class Confidence:
    """Measured on drafts and on what came where they were."""

    def __init__(self) -> None:
        self._tried = [_KNOWN] * CLASSES
        self._right = [_KNOWN * (number + 0.5) / CLASSES for number in range(CLASSES)]

    @staticmethod
    def class_of(probability: float) -> int:
        return min(int(probability * CLASSES), CLASSES - 1)

    def rate(self, kind: int) -> float:
        """How probably a token of that class is right."""
        return self._right[kind] / self._tried[kind]

    def note(self, kind: int, right: bool) -> None:
        if self._tried[kind] >= _MEMORY:
            self._tried[kind] /= 2
            self._right[kind] /= 2
        self._tried[kind] += 1
        self._right[kind] += right
