"""How much of a draft is worth verifying, and what a step costs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.speculate.costs import OUTLIER, StepCosts
from tokenmill.speculate.lengths import choose_lengths
from tokenmill.speculate.proposer import Worth

ODDS = st.lists(st.lists(st.sampled_from([0.1, 0.5, 0.8, 0.95]), max_size=4), min_size=1, max_size=3)


def expected(odds: list[list[float]], lengths: tuple[int, ...]) -> float:
    total = float(len(odds))
    for each, length in zip(odds, lengths, strict=True):
        chance = 1.0
        for one in each[:length]:
            chance *= one
            total += chance
    return total


@settings(max_examples=300, deadline=None)
@given(ODDS, st.floats(0.0, 1.0), st.sampled_from([0.0, 0.02]))
def test_no_other_lengths_give_more_tokens_per_second(odds: list[list[float]], slope: float, margin: float) -> None:
    """Of a cost that grows by the row, all choices are tried."""
    rows = len(odds)

    def seconds(count: int) -> float:
        return 1 + slope * (count - 1)

    chosen = choose_lengths(odds, rows, seconds, margin)
    rates = {c: expected(odds, c) / seconds(rows + sum(c)) for c in product(*(range(len(each) + 1) for each in odds))}
    none = tuple(0 for _ in odds)
    best = max(rates.values())
    if best > (1 + margin) * rates[none] + 1e-12:
        assert rates[tuple(chosen)] == pytest.approx(best)
    else:
        assert tuple(chosen) == none or rates[tuple(chosen)] == pytest.approx(best)


def test_a_dear_number_of_rows_is_stepped_over() -> None:
    """Two rows cost as much as four: with odds that pay for four, four it is; with odds that do not pay for two, none."""
    cost = {1: 1.0, 2: 1.9, 3: 1.95, 4: 2.0, 5: 9.0}
    assert choose_lengths([[0.9] * 4], 1, cost.__getitem__) == [3]
    assert choose_lengths([[0.4] * 4], 1, cost.__getitem__) == [0]


def test_likely_tokens_come_before_unlikely_ones_of_another_draft() -> None:
    cost = {2: 2.0, 3: 2.3, 4: 2.6, 5: 2.9, 6: 3.2}
    assert choose_lengths([[0.1, 0.9], [0.9, 0.9]], 2, cost.__getitem__) == [0, 2]


def test_gain_is_of_the_best_part() -> None:
    worth = Worth(1, 1.0, lambda rows: 0.5 + 0.5 * rows)
    assert worth.best([0.9, 0.1]).saved == pytest.approx(0.4)
    assert worth.best([0.4, 0.9]).saved == 0
    assert worth.best([0.9], drafting=0.3).saved == pytest.approx(0.1)
    assert worth.best([]).saved == 0
    assert Worth(1, 1.0, lambda rows: 1.0 if rows < 4 else 5.0).best([0.9], drafts=4).saved == 0, "four such drafts need rows that cost"


def test_a_token_is_worth_less_where_drafts_have_made_tokens_cheap() -> None:
    worth = Worth(1, 1.0, lambda rows: 0.8 + 0.2 * rows)
    later = worth._replace(rows=4, tokens=3.5, spent=0.3)
    assert later.token == pytest.approx(1.9 / 3.5)
    assert worth.best([0.5], drafting=0.1).saved > 0
    assert later.best([0.5], drafting=0.1).saved == 0


def test_the_floor_is_that_of_the_cheapest_row() -> None:
    cost = {1: 1.0, 2: 1.9, 3: 1.2, 4: 2.0}
    assert Worth(1, 1.0, cost.__getitem__).floor(3) == pytest.approx(0.1)
    assert Worth(1, 1.0, cost.__getitem__).floor(0) == 0


def test_costs_are_averages_with_lines_between_and_the_usual_shape_beyond() -> None:
    costs = StepCosts()
    assert not costs.known
    costs.observe(1, 10.0)
    assert costs.seconds(6) == pytest.approx(20.0)
    costs.observe(5, 30.0)
    assert costs.seconds(3) == pytest.approx(20.0)
    assert costs.seconds(5) == 30.0
    for _ in range(60):
        costs.observe(5, 18.0)
    assert costs.seconds(5) == pytest.approx(18.0, rel=0.01)
    assert costs.seconds(10) > 18.0


def test_a_step_that_was_disturbed_counts_little() -> None:
    costs = StepCosts()
    costs.observe(1, 10.0)
    costs.observe(1, 5000.0)
    assert costs.seconds(1) <= 10.0 * (1 + (OUTLIER - 1) / 4)
