"""What acceptance and the costs of steps say of the speed: arithmetic on steps that were measured. Pure.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with costs that rise with the rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from tokenmill.measure.speculation.runs import Step, Turn

ENOUGH = 5
"""Steps behind a point of the curve; where there are fewer with as many rows, neighbours are taken together."""


@dataclass(frozen=True)
class Costs:
    """start: median seconds until a step without drafts was started. rows, computed: a curve, medians of seconds from there on."""

    start: float
    rows: Sequence[float]
    computed: Sequence[float]

    @classmethod
    def of(cls, plain: Sequence[Step], steps: Iterable[Step]) -> Costs:
        """plain: those without drafts. steps: all."""
        points: list[tuple[float, float]] = []
        waiting: list[Step] = []
        for _, same in groupby(sorted(steps, key=lambda step: step.rows), key=lambda step: step.rows):
            waiting += same
            if len(waiting) >= ENOUGH:
                points.append(_point(waiting))
                waiting = []
        if waiting:  # of the most rows
            points.append(_point(waiting))
        rows, computed = zip(*points, strict=True)
        return cls(statistics.median(step.started for step in plain), rows, computed)

    def seconds(self, rows: float) -> float:
        """Of a step, without the proposer."""
        return self.start + float(np.interp(rows, self.rows, self.computed))

    def proposing(self, turn: Turn) -> float:
        """Mean seconds of a step that went to drafts."""
        return max(0.0, statistics.fmean(step.started for step in turn.steps) - self.start) if turn.steps else 0.0


def predicted(turn: Turn, costs: Costs) -> float:
    """Seconds that these steps take at these costs, the proposer's own as measured."""
    return sum(step.started - costs.start + costs.seconds(step.rows) for step in turn.steps)


def allowed(probe: Turn, costs: Costs) -> float:
    """The speed-up of the best single length of drafts, none included: by the acceptance of drafts that were as long as they could be.

    Every stream takes the steps that its tokens need at its mean, and leaves the others when it is done. The proposer takes its time in
    proportion to the tokens that are drafted.
    """
    longest = max((drafted for step in probe.steps for drafted, _ in step.streams.values()), default=0)
    proposing = costs.proposing(probe)
    whole = _mean_drafted(probe, longest)

    def seconds(length: int) -> float:
        share = _mean_drafted(probe, length) / whole if whole else 0.0
        return sum(_seconds(group, length, proposing * share, costs) for group in probe.groups)

    return seconds(0) / min(map(seconds, range(longest + 1)))


def speedup(acceptance: float, streams: int, most: int, costs: Costs, token_seconds: float = 0.0) -> float:
    """Of drafts whose every token is right with that probability, at the best length up to `most`. token_seconds: of drafting one for
    every stream."""
    expected, best, reached = 1.0, 1.0, 1.0
    plain = costs.seconds(streams)
    for length in range(1, most + 1):
        reached *= acceptance
        expected += reached
        best = max(best, expected * plain / (costs.seconds(streams * (1 + length)) + length * token_seconds))
    return best


def _seconds(group: Sequence[Step], length: int, proposing: float, costs: Costs) -> float:
    """Of a group of streams, with drafts cut to a length."""
    plans = []
    for number in {number for step in group for number in step.streams}:
        found = [step.streams[number] for step in group if number in step.streams]
        rows = statistics.fmean(1 + min(drafted, length) for drafted, _ in found)
        new = statistics.fmean(min(new, 1 + length) for _, new in found)
        plans.append((sum(new for _, new in found) / new, rows))
    done, total = 0.0, 0.0
    alive = sum(rows for _, rows in plans)
    for steps, rows in sorted(plans):
        total += (steps - done) * (costs.seconds(alive) + proposing)
        done, alive = steps, alive - rows
    return total


def _mean_drafted(turn: Turn, length: int) -> float:
    """Tokens of drafts cut to a length, in a step."""
    return sum(min(drafted, length) for step in turn.steps for drafted, _ in step.streams.values()) / max(1, len(turn.steps))


def _point(steps: Sequence[Step]) -> tuple[float, float]:
    return statistics.fmean(step.rows for step in steps), statistics.median(step.computed for step in steps)
