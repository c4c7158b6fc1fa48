"""What is promised of the KV cache, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tokenmill.core.types import FRAME
from tokenmill.measure.report import Column, Row, Table


class Limit(NamedTuple):
    """least: whether the figure may not be below, or not above, the limit."""

    name: str
    limit: float
    least: bool


LONG_PROMPT, SHORT_QUESTION = 1000, 0.05
"""Tokens of a system prompt for which the time of a hit is promised, and the share of it that questions may have: of less the time is
that of the question, and of a step with whatever tokens. Of a prompt below `SOME_PROMPT` a part of a frame is too much of it."""
SOME_PROMPT = 10 * FRAME

ONCE = Limit("share of the system prompt stored once", 0.9, least=True)
HIT = Limit("TTFT of a hit / of a miss", 0.15, least=False)
WASTE = Limit("unfilled positions, dynamic / size 8", 1.0, least=False)
SPEED = Limit("decode step, dynamic / best fixed size", 1.03, least=False)
SMALLER = Limit("16-bit / int8 keys with int4 values", 2.5, least=True)


def limits_table() -> Table:
    columns = (
        Column("name", "promised"),
        Column("figure", "figure", 1, 3),
        Column("bound", ""),
        Column("limit", "limit", 1, 3),
        Column("used", "used", 1, 2),
        Column("verdict", ""),
    )
    return Table("limits", "figures beside their limits, and how much of the limit is used up", columns)


def limit_rows(sharing: Table, pages: Table, steps: Table, formats: Table) -> Iterator[Row]:
    """A row for each limit of which there is a figure: an interrupted measurement has fewer."""
    for row in sharing.rows:
        if row["sharing"] == "radix":
            shared, own = float(row["shared"] or 0), float(row["own"] or 0)
            yield _row(ONCE, float(row["once"] or 0), str(row["arrival"]), judged=shared >= SOME_PROMPT)
            if row["arrival"] == "one by one":
                judged = shared >= LONG_PROMPT and own <= SHORT_QUESTION * shared
                yield _row(HIT, float(row["others_to_first"] or 0), judged=judged)
    waste = {row["policy"]: float(row["waste"] or 0) for row in pages.rows}
    if "dynamic" in waste and "8" in waste:
        yield _row(WASTE, waste["dynamic"] / waste["8"])
    for row in steps.rows:
        if row["policy"] == "dynamic":
            yield _row(SPEED, float(row["to_best"] or 0), f"{row['streams']} x {row['context']}")
    smaller = [float(row["ratio"] or 0) for row in formats.rows if row["format"] == "int8/int4"]
    if smaller:
        yield _row(SMALLER, smaller[-1])


def _row(limit: Limit, figure: float, case: str | None = None, judged: bool = True) -> Row:
    """judged: whether what was measured is a case for which the limit is promised."""
    parts = (limit.limit, figure) if limit.least else (figure, limit.limit)
    verdict = "held" if parts[0] <= parts[1] else "MISSED"
    return {
        "name": limit.name if case is None else f"{limit.name}, {case}",
        "figure": figure,
        "bound": "at least" if limit.least else "at most",
        "limit": limit.limit,
        "used": parts[0] / parts[1] if judged and parts[1] else None,
        "verdict": verdict if judged else "not judged",
    }
