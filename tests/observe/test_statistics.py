from __future__ import annotations

import pytest

from tokenmill.observe.statistics import Summary, percentile, summarise


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([7.0], 0.99, 7.0),
        ([1.0, 2.0, 3.0, 4.0], 0.0, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 1.0, 4.0),
        ([10.0, 20.0, 30.0], 0.9, 28.0),
        ([0.0, 0.0, 100.0], 0.99, 98.0),
    ],
)
def test_a_percentile_lies_between_the_two_nearest_values(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_a_summary_has_what_was_computed_by_hand() -> None:
    assert summarise([4.0, 1.0, 3.0, 2.0]) == Summary(4, 2.5, 2.5, pytest.approx(3.7), pytest.approx(3.97), 4.0)


def test_no_values_have_no_summary() -> None:
    assert summarise([]) is None
