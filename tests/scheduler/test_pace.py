"""How many rows fit into the time of a step: found, kept, and found again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tokenmill.core.types import SamplingParams
from tokenmill.scheduler.pace import FIRST, Pace
from tokenmill.scheduler.plan import Work
from tokenmill.scheduler.sequence import Sequence


def step(streams: int, prompt: int = 0, draft: int = 0) -> list[Work]:
    """So many streams, each with a draft, beside a prompt."""
    one = Sequence("a", 0, [1] * 4096, SamplingParams(max_tokens=1), 0, 1, 0.0)
    decoding = [Work(one, 9, 1, True, draft=(7,) * draft) for _ in range(streams)]
    return [*decoding, Work(one, 0, prompt, False)] if prompt else decoding


def serve(pace: Pace, steps: int, cost: Callable[[int], float], streams: int) -> list[float]:
    """Steps as the plan makes them of a prompt without end; returns what they took."""
    took = []
    for _ in range(steps):
        prompt = max(pace.rows - streams, 8, streams // 4)
        took.append(cost(streams + prompt))
        pace.learn(step(streams, prompt), took[-1])
    return took


@pytest.mark.parametrize("base", [0.0, 0.004, 0.03])
@pytest.mark.parametrize("row", [0.00005, 0.0005, 0.003])
def test_steps_come_to_take_the_time_that_they_may(base: float, row: float) -> None:
    pace = Pace(0.1)
    took = serve(pace, 60, lambda rows: base + row * rows, streams=3)
    assert took[-1] == pytest.approx(0.1, rel=0.1 + row / 0.1)
    assert min(took[40:]) > 0.8 * (0.1 - row)


@pytest.mark.parametrize("seed", range(20))
def test_it_follows_a_machine_that_changes_and_never_gets_stuck(seed: int) -> None:
    rng = random.Random(seed)
    pace = Pace(0.1)
    for _ in range(8):
        base, row = rng.uniform(0, 0.05), rng.choice((0.0001, 0.0004, 0.001, 0.004))
        streams = rng.randint(1, 5)

        def cost(rows: int, base: float = base, row: float = row) -> float:
            return (base + row * rows) * rng.uniform(0.97, 1.03) * (4.0 if rng.random() < 0.02 else 1.0)

        serve(pace, 80, cost, streams)
        fits = max((0.1 - base) / row, streams + 8)
        assert 0.4 * fits - 1 < pace.rows < 1.3 * fits + 1, f"seed {seed}: {pace.rows} rows, of which {fits:.0f} fit"


def test_one_step_that_was_put_aside_costs_a_quarter_at_most() -> None:
    pace = Pace(0.1)
    serve(pace, 60, lambda rows: 0.0005 * rows, streams=1)
    before = pace.rows
    pace.learn(step(1, before - 1), 60.0)
    assert pace.rows >= 0.74 * before


def test_steps_that_were_short_for_want_of_work_say_nothing() -> None:
    pace = Pace(0.1)
    pace.learn(step(2, prompt=9), 0.05)
    pace.learn(step(2), 0.001)
    pace.learn(step(0, prompt=512), 2.0)
    pace.learn(step(300), 2.0)
    assert pace.rows == FIRST, "a step without streams keeps nobody waiting, and one without prompts would be no shorter"
    pace.learn(step(2, prompt=9), 0.2)
    assert pace.rows < FIRST, "one that was too long says something, however few rows it had"


def test_rows_of_drafts_count() -> None:
    plain, drafting = Pace(0.1), Pace(0.1)
    plain.learn(step(4, prompt=100), 0.05)
    drafting.learn(step(4, prompt=20, draft=20), 0.05)
    assert plain.rows == drafting.rows > FIRST


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    pace = Pace(0.1)
    pace.learn(step(1, prompt=100), 0.0)
    assert FIRST < pace.rows <= 2 * FIRST
