"""What is promised, beside what was measured."""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.measure.report import Column, Row, Table


class Limit(NamedTuple):
    """least: whether the figure may not be below, or not above, the limit."""

    name: str
    limit: float
    least: bool

    def row(self, figure: float, case: str | None = None, judged: bool = True) -> Row:
        """judged: whether what was measured is a case for which the limit is promised."""
        parts = (self.limit, figure) if self.least else (figure, self.limit)
        verdict = "held" if parts[0] <= parts[1] else "MISSED"
        return {
            "name": self.name if case is None else f"{self.name}, {case}",
            "figure": figure,
            "bound": "at least" if self.least else "at most",
            "limit": self.limit,
            "used": parts[0] / parts[1] if judged and parts[1] > 0 else None,
            "verdict": verdict if judged else "not judged",
        }


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
