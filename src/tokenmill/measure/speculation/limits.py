"""What is promised of drafts, beside what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenmill.measure.limits import Limit
from tokenmill.measure.report import Row, by_key


class Gain(NamedTuple):
    """The best of some methods at one stream, of those that were measured; methods: None for any."""

    workload: str
    methods: tuple[str, ...] | None
    limit: Limit


GAINS = (
    Gain("edit", ("ngram", "suffix"), Limit("speed-up of edit, one stream, looked up", 3.0, least=True)),
    Gain("extract", None, Limit("speed-up of extract, one stream", 1.5, least=True)),
    Gain("code", ("draft", "combined"), Limit("speed-up of code, one stream, with a draft model", 1.25, least=True)),
)
LOSS = Limit("speed-up at worst", 0.97, least=True)
SHARE = Limit("share of the gain that costs and acceptance allow", 0.7, least=True)
MANY = 16
"""Streams at which it is held against that."""


def limit_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Of the rows of `speculation`: of an interrupted measurement there are fewer."""
    drafting = [row for row in rows if row["speedup"] is not None]
    for gain in GAINS:
        found = [
            row
            for row in drafting
            if (row["workload"], row["streams"]) == (gain.workload, 1) and (gain.methods is None or row["method"] in gain.methods)
        ]
        if found:
            best = max(found, key=_speedup)
            yield gain.limit.row(_speedup(best), str(best["method"]))
    for streams, alike in by_key(drafting, "streams").items():
        for workload, of_workload in by_key(alike, "workload").items():
            worst = min(of_workload, key=_speedup)
            yield LOSS.row(_speedup(worst), f"{workload}, streams {streams}: {worst['method']}")
    for row in drafting:
        if row["streams"] == MANY and row["gain_share"] is not None:
            yield SHARE.row(float(row["gain_share"]), f"{row['workload']}, {row['method']}")


def _speedup(row: Row) -> float:
    return float(row["speedup"] or 0)
