"""What is measured, in which order, and how figures are drawn from it. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

CONTEXT = 128
PROMPT = 512


@dataclass(frozen=True)
class Cell:
    """A column of the tables. streams: sequences that decode together, 0 for a prefill. steps: decode steps per measurement."""

    streams: int
    steps: int

    @property
    def label(self) -> str:
        return f"decode {self.streams}" if self.streams else f"prefill {PROMPT}"

    @property
    def tokens(self) -> int:
        """Tokens that a measured time is for."""
        return self.streams or PROMPT

    def prompts(self, turn: int) -> list[list[int]]:
        """The prompts of a round: the same for all engines, new in every round, so that no prefix cache has them. The ids are those of
        ordinary tokens in any vocabulary of 32,000 or more."""
        draw = random.Random(f"{self.label} {turn}")
        length = CONTEXT if self.streams else PROMPT
        return [[draw.randrange(1000, 30000) for _ in range(length)] for _ in range(self.streams or 1)]


CELLS = (Cell(0, 1), Cell(1, 48), Cell(16, 24), Cell(32, 16))

BATCHES = tuple(Cell(streams, 16) for streams in (1, 2, 4, 8, 16, 24, 32, 48, 64))
"""For the plot of step time against batch size."""

T = TypeVar("T")


def alternation(rounds: int, cells: Sequence[Cell], engines: Sequence[T]) -> Iterator[tuple[int, Cell, T]]:
    """(round, cell, engine) in order of measurement: each cell goes through all engines before the next, so that what disturbs the
    machine for a while meets all of them. Round 0 is the warm-up, and does not count."""
    for turn in range(rounds + 1):
        for cell in cells:
            for engine in engines:
                yield turn, cell, engine


@dataclass(frozen=True)
class Figure:
    """Tokens per second: the median of the rounds, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, tokens: int, seconds: Sequence[float]) -> Figure:
        """seconds: of each round, at least one."""
        rates = [tokens / s for s in seconds]
        return cls(statistics.median(rates), min(rates), max(rates))
