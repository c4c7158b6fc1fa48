"""What is promised of the KV cache, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.core.types import FRAME
from tokenmill.measure.limits import Limit
from tokenmill.measure.report import Row, Table

LONG_PROMPT, SHORT_QUESTION = 1000, 0.05
"""Tokens of a system prompt for which the time of a hit is promised, and the share of it that questions may have: of less the time is
that of the question, and of a step with whatever tokens. Of a prompt below `SOME_PROMPT` a part of a frame is too much of it."""
SOME_PROMPT = 10 * FRAME

ONCE = Limit("share of the system prompt stored once", 0.9, least=True)
HIT = Limit("TTFT of a hit / of a miss", 0.15, least=False)
WASTE = Limit("unfilled positions, dynamic / size 8", 1.0, least=False)
SPEED = Limit("decode step, dynamic / best fixed size", 1.03, least=False)
SMALLER = Limit("16-bit / int8 keys with int4 values", 2.5, least=True)


def limit_rows(sharing: Table, pages: Table, steps: Table, formats: Table) -> Iterator[Row]:
    """A row for each limit of which there is a figure: an interrupted measurement has fewer."""
    for row in sharing.rows:
        if row["sharing"] == "radix":
            shared, own = float(row["shared"] or 0), float(row["own"] or 0)
            yield ONCE.row(float(row["once"] or 0), str(row["arrival"]), judged=shared >= SOME_PROMPT)
            if row["arrival"] == "one by one":
                judged = shared >= LONG_PROMPT and own <= SHORT_QUESTION * shared
                yield HIT.row(float(row["others_to_first"] or 0), judged=judged)
    waste = {row["policy"]: float(row["waste"] or 0) for row in pages.rows}
    if "dynamic" in waste and "8" in waste:
        yield WASTE.row(waste["dynamic"] / waste["8"])
    for row in steps.rows:
        if row["policy"] == "dynamic":
            yield SPEED.row(float(row["to_best"] or 0), f"{row['streams']} x {row['context']}")
    smaller = [float(row["ratio"] or 0) for row in formats.rows if row["format"] == "int8/int4"]
    if smaller:
        yield SMALLER.row(smaller[-1])
