from __future__ import annotations

import pytest

from tokenmill.measure.serving import Objective, Record, charts, serving_tables, times_table, totals

FAST = Record(scheduled=10.0, sent=10.0, times=[10.1, 10.2, 10.3], ended=10.3, prompt_tokens=5, output_tokens=3, cached_tokens=4)
LATE = Record(scheduled=10.0, sent=11.5, times=[12.0, 12.5], ended=12.5, prompt_tokens=7, output_tokens=2)
SINGLE = Record(scheduled=11.0, sent=11.0, times=[11.1], ended=11.1, prompt_tokens=1, output_tokens=1)
FAILED = Record(scheduled=12.0, sent=12.0, ended=12.0, error="HTTP 503: draining")
RUNNING = Record(scheduled=12.0, sent=12.0, times=[12.1])
ALL = [FAST, LATE, SINGLE, FAILED, RUNNING]


def test_the_first_token_is_counted_from_the_scheduled_arrival() -> None:
    """A client that sends late must not make the server look fast."""
    assert LATE.ttft == pytest.approx(2.0)
    assert LATE.e2e == pytest.approx(2.5)


def test_gaps_and_time_per_token_leave_the_first_token_out() -> None:
    assert FAST.gaps == pytest.approx([0.1, 0.1])
    assert FAST.tpot == pytest.approx(0.1)
    assert SINGLE.gaps == []
    assert SINGLE.tpot is None
    two_tokens_a_piece = Record(scheduled=0.0, times=[1.0, 2.0], output_tokens=5)
    assert two_tokens_a_piece.tpot == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        (Objective(), [FAST, LATE, SINGLE]),
        (Objective(ttft=0.15), [FAST, SINGLE]),
        (Objective(itl=0.2), [FAST, SINGLE]),
        (Objective(ttft=0.05), []),
        (Objective(ttft=5, itl=0.6), [FAST, LATE, SINGLE]),
    ],
)
def test_an_objective_is_met_by_whole_requests_that_ended_well(objective: Objective, good: list[Record]) -> None:
    assert [record for record in ALL if objective.met_by(record)] == good


def test_totals_were_computed_by_hand() -> None:
    assert totals(ALL, 4.0, Objective(ttft=0.15)) == {
        "seconds": 4.0,
        "requests": 5,
        "completed": 3,
        "failed": 1,
        "unfinished": 1,
        "prompt_tokens": 13,
        "cached_tokens": 4,
        "output_tokens": 6,
        "requests_per_second": 0.75,
        "output_tokens_per_second": 1.5,
        "tokens_per_second": 4.75,
        "goodput": 0.5,
        "good_share": 0.5,
    }


def test_without_an_objective_there_is_no_goodput() -> None:
    row = totals(ALL, 4.0, Objective())
    assert (row["goodput"], row["good_share"]) == (None, None)


def test_a_run_of_errors_only_has_no_good_requests() -> None:
    row = totals([FAILED], 1.0, Objective(ttft=1.0))
    assert (row["goodput"], row["good_share"], row["failed"]) == (0.0, 0.0, 1)


def test_latencies_count_first_tokens_of_requests_still_running_and_nothing_of_failed_ones() -> None:
    rows = {row["what"]: row for row in times_table(ALL).rows}
    assert {what: row["n"] for what, row in rows.items()} == {"TTFT": 4, "ITL": 3, "TPOT": 2, "E2E": 3, "client lag": 5}
    assert rows["TTFT"]["most"] == pytest.approx(2.0)
    assert rows["client lag"]["most"] == pytest.approx(1.5)


def test_errors_are_counted_by_their_text() -> None:
    tables = serving_tables([FAST, FAILED, FAILED], 1.0, Objective())
    assert [table.name for table in tables] == ["totals", "times", "errors"]
    assert tables[2].rows == [{"count": 2, "error": "HTTP 503: draining"}]
    assert [table.name for table in serving_tables([FAST], 1.0, Objective())] == ["totals", "times"]


def test_nothing_measured_is_reported_as_such() -> None:
    rendered = [table.render() for table in serving_tables([], 1.0, Objective(ttft=1.0))]
    assert "TTFT        0" in rendered[1]


def test_charts_show_shares_of_requests_and_the_bound() -> None:
    first, later = charts(ALL, Objective(ttft=0.5))
    assert first.lines[0].xs == pytest.approx([100.0, 100.0, 2000.0])
    assert first.lines[0].ys == pytest.approx([1 / 3, 2 / 3, 1])
    assert first.lines[1].xs == [500.0, 500.0]
    assert [line.label for line in later.lines] == ["requests"]
