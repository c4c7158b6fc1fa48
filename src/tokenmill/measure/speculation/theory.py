"""What acceptance and the costs of steps say of the speed: arithmetic on steps that were measured. Pure.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with costs that rise with the rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import mul
from typing import NamedTuple

import numpy as np

from tokenmill.measure.speculation.runs import Step, Turn

ENOUGH = 5
"""Steps behind a point of the curve; where there are fewer with as many rows, neighbours are taken together."""

THRESHOLDS = 33
"""That are tried, with as many drafted tokens between each two."""
NEVER = 2.0
"""A threshold that no token reaches."""


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
    """The speed-up of the best single threshold: of drafts that were as long as they could be, the tokens are verified that are held to be
    reached and right with that probability at least, or none.

    The proposer takes its time in proportion to the tokens that are verified.
    """
    chances = sorted(chance for step in probe.steps for verified in step.streams.values() for chance in accumulate(verified.odds, mul))
    thresholds = [chances[at * (len(chances) - 1) // (THRESHOLDS - 1)] for at in range(THRESHOLDS)] if chances else []
    drafting = costs.proposing(probe) * len(probe.steps) / len(chances) if chances else 0.0

    def seconds(threshold: float) -> float:
        return sum(_seconds(_plans(group, threshold), costs, drafting) for group in probe.groups if group)

    plain = seconds(NEVER)
    return plain / min([plain, *map(seconds, dict.fromkeys(thresholds))])


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


class Plan(NamedTuple):
    """A stream with drafts cut. tokens: that it gets. steps: that they take. verified: drafted tokens in all of them."""

    tokens: int = 0
    steps: float = 0.0
    verified: float = 0.0


def _plans(group: Sequence[Step], threshold: float) -> list[Plan]:
    """Of each stream of a group. What was right in one step beyond where its draft is cut takes further steps alike."""
    plans: dict[int, Plan] = {}
    for step in group:
        for number, (odds, new) in step.streams.items():
            length = sum(chance >= threshold for chance in accumulate(odds, mul))
            steps = new / min(new, 1 + length)
            before = plans.get(number, Plan())
            plans[number] = Plan(before.tokens + new, before.steps + steps, before.verified + steps * length)
    return list(plans.values())


def _seconds(plans: Sequence[Plan], costs: Costs, drafting: float) -> float:
    """For the tokens of streams that run together, each at its own pace. drafting: seconds per token that is verified."""
    pace = sum(plan.tokens / plan.steps for plan in plans)
    verified = sum(plan.verified / plan.steps for plan in plans)
    return sum(plan.tokens for plan in plans) / pace * (costs.seconds(len(plans) + verified) + drafting * verified)


def _point(steps: Sequence[Step]) -> tuple[float, float]:
    return statistics.fmean(step.rows for step in steps), statistics.median(step.computed for step in steps)
