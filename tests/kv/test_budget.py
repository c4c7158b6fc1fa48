"""The ladder of a budget against a slow twin that computes token by token, and what it promises."""

import itertools
import random

import pytest

from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv.budget import WEIGHED, Ladder, Rung, SparsePolicy, Strategy, lightest
from tokenmill.kv.footprint import Footprint, frames_for
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window


def footprint(*rules: Retention) -> Footprint:
    return Footprint.of([KVGroup(str(number), rule, ((number, 0),)) for number, rule in enumerate(rules)])


class Walker:
    """Decodes one token at a time and counts every frame of every group as a set."""

    def __init__(self, rules: list[Retention], policy: SparsePolicy, budget: int, steps: int) -> None:
        self.rungs: list[Rung] = []
        self.ended: int | None = None
        held: list[set[int]] = [set() for _ in rules]
        sparse = stuck = False
        for position in range(steps):
            for group, rule in enumerate(rules):
                held[group].add(position // FRAME)
                if isinstance(rule, Window) or (isinstance(rule, Streaming) and sparse):
                    reach = rule.tokens if isinstance(rule, Window) else rule.recent
                    sinks = 0 if isinstance(rule, Window) else rule.sinks // FRAME
                    held[group] -= {f for f in held[group] if sinks <= f and FRAME * (f + 1) <= position + 1 - reach}
            count = sum(map(len, held))
            if count > budget and self.ended is None:
                self.ended = position
                return
            computed = position + 1
            if computed % FRAME or policy.strategy == "none" or stuck:
                continue
            next_frame = self.after(rules, held, computed, sparse)
            last = self.rungs[-1].point if self.rungs else -WEIGHED
            if next_frame <= int(policy.trigger_threshold * budget) or computed < last + WEIGHED:
                continue
            drop = self.give_up(rules, held, policy, computed, first=not self.rungs)
            stuck = drop is None
            if drop is not None:
                self.rungs.append(Rung(computed, drop))
                sparse = policy.strategy == "topk_heads"

    def after(self, rules: list[Retention], held: list[set[int]], computed: int, sparse: bool) -> int:
        """The most frames that are held while the next frame of positions is filled."""
        most = 0
        for position in range(computed, computed + FRAME):
            count = 0
            for group, rule in enumerate(rules):
                frames = held[group] | {computed // FRAME}
                if isinstance(rule, Window) or (isinstance(rule, Streaming) and sparse):
                    reach = rule.tokens if isinstance(rule, Window) else rule.recent
                    sinks = 0 if isinstance(rule, Window) else rule.sinks // FRAME
                    frames -= {f for f in frames if sinks <= f and FRAME * (f + 1) <= position + 1 - reach}
                count += len(frames)
            most = max(most, count)
        return most

    def give_up(self, rules: list[Retention], held: list[set[int]], policy: SparsePolicy, computed: int, first: bool) -> int | None:
        if first and policy.strategy == "topk_heads":
            before = sum(map(len, held))
            for group, rule in enumerate(rules):
                if isinstance(rule, Streaming):
                    low = (computed + 1 - rule.recent) // FRAME
                    held[group] -= set(range(rule.sinks // FRAME, max(low, rule.sinks // FRAME)))
            return 0 if sum(map(len, held)) < before else None
        wholes = [group for group, rule in enumerate(rules) if rule == Whole()]
        droppable = [f for f in sorted(held[wholes[0]]) if policy.sinks <= f * FRAME < computed - WEIGHED] if wholes else []
        drop = len(droppable) - next(n for n in range(len(droppable) + 1) if n >= policy.keep_ratio * len(droppable) - 1e-9)
        if not drop:
            return None
        for group in wholes:
            held[group] -= set(droppable[:drop])
        return drop


SHAPES: list[list[Retention]] = [
    [Whole()],
    [Whole(), Whole(), Streaming(16, 64)],
    [Whole(), Streaming(0, 32), Streaming(0, 32)],
    [Whole(), Window(40)],
    [Whole(), Window(16), Window(33), Streaming(32, 16)],
]


@pytest.mark.parametrize("seed", range(40))
def test_points_and_end_are_those_of_counting_every_frame(seed: int) -> None:
    rng = random.Random(seed)
    rules = rng.choice(SHAPES)
    strategies = ["none", "topk_positions", "topk_heads"] if any(isinstance(r, Streaming) for r in rules) else ["none", "topk_positions"]
    policy = SparsePolicy(rng.choice(strategies), rng.choice((0.7, 0.9)), rng.choice((0.3, 0.7)), rng.choice((8, 16)))  # type: ignore[arg-type]
    budget = rng.randint(20, 60) * len(rules)
    twin = Walker(rules, policy, budget, steps=1500)
    ladder = Ladder(budget, policy, footprint(*rules))
    found = list(itertools.takewhile(lambda rung: rung.point < (twin.ended or 1500) - FRAME, rungs(ladder)))
    expected = [rung for rung in twin.rungs if rung.point < (twin.ended or 1500) - FRAME]
    assert found == expected, f"seed {seed}: {rules}, {policy}, {budget}"
    if twin.ended is None:
        assert ladder.fits(1400)
    else:
        assert abs(next(n for n in range(10_000) if not ladder.fits(n + 1)) - twin.ended) <= 1, f"seed {seed}"


def rungs(ladder: Ladder) -> list[Rung]:
    return [rung for rung in map(ladder.rung, range(60)) if rung is not None]


def test_a_ladder_is_a_function_of_its_numbers_however_it_is_asked() -> None:
    policy, shape = SparsePolicy("topk_positions"), footprint(Whole(), Window(40))
    one, other = Ladder(90, policy, shape), Ladder(90, policy, shape)
    assert other.fits(5000)
    assert [one.rung(number) for number in range(8)] == [other.rung(number) for number in range(8)]


def test_points_are_aligned_and_far_enough_apart_to_be_weighed() -> None:
    for budget in range(1, 120):
        points = [rung.point for rung in rungs(Ladder(budget, SparsePolicy("topk_positions", keep_ratio=0.9), footprint(Whole())))]
        assert all(point % FRAME == 0 for point in points)
        assert all(later - earlier >= WEIGHED for earlier, later in itertools.pairwise(points))
        assert not points or points[0] >= WEIGHED


def test_what_is_kept_never_exceeds_the_budget_while_it_fits() -> None:
    for budget, strategy in itertools.product(range(10, 120, 7), ("topk_heads", "topk_positions", "none")):
        ladder = Ladder(budget, SparsePolicy(strategy), footprint(Whole(), Streaming(16, 32)))  # type: ignore[arg-type]
        most = next((n for n in range(1, 3000) if not ladder.fits(n)), 3000)
        assert all(ladder.peak(n) <= budget for n in range(1, most))
        assert not any(ladder.fits(n) for n in range(most, 3000, 50)), "what did not fit fits again when it is longer"


def test_without_a_strategy_the_budget_is_a_length() -> None:
    ladder = Ladder(10, SparsePolicy(), footprint(Whole(), Whole()))
    assert ladder.rung(0) is None
    assert ladder.fits(5 * FRAME)
    assert not ladder.fits(5 * FRAME + 1)


def test_windows_alone_outgrow_no_budget_that_holds_them() -> None:
    assert Ladder(8, SparsePolicy(), footprint(Window(50))).fits(10**9)
    assert not Ladder(7, SparsePolicy(), footprint(Window(50))).fits(57)


def test_of_equal_frames_the_earlier_goes_first() -> None:
    assert lightest([5, 1, 1, 0, 1, 9], [0, 1, 2, 4, 5], 2) == [1, 2]
    assert lightest([5, 1, 1, 0, 1, 9], [0, 2, 4, 5], 3) == [0, 2, 4]


@pytest.mark.parametrize("window", range(1, 60))
def test_a_window_is_counted_as_what_it_touches(window: int) -> None:
    shape = footprint(Window(window))
    kept = max(position // FRAME - max(0, position + 1 - window) // FRAME + 1 for position in range(200, 300))
    assert shape.kept(10**6) == kept
    for chunk in range(1, 40):
        spans = (frames_for(start + chunk) - (start + 1 - window) // FRAME for start in range(200, 300))
        assert shape.taken(0, 10**6, chunk) == max(spans)
        assert shape.taken(0, 10**6, chunk) <= shape.kept(10**6) + shape.transient(chunk)


@pytest.mark.parametrize("strategy", ["topk_heads", "topk_positions"])
def test_a_threshold_met_before_there_is_anything_to_give_up_waits_until_there_is(strategy: Strategy) -> None:
    """A budget that serves any length at one threshold serves it at every lower one."""
    footprint = Footprint(5, 2, 64, 256, ()) if strategy == "topk_heads" else Footprint(7, 0, 0, 0, ())
    for threshold in (0.9, 0.5, 0.1, 1e-9):
        ladder = Ladder(7 * 700 // 8, SparsePolicy(strategy, threshold, 0.7, 64), footprint)
        first = ladder.rung(0)
        assert first is not None
        assert ladder.fits(20_000), threshold
        assert first.point <= 630
