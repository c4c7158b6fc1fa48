"""From what was seen of each request to the figures of a server. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from tokenmill.measure.plot import Chart, Line
from tokenmill.measure.report import Column, Row, Table
from tokenmill.observe.statistics import Summary, summarise


@dataclass
class Record:
    """One request as its client saw it; times are seconds on one clock.

    scheduled: when it was to arrive; sent: when it was sent. times: of each piece of text. ended: when nothing more was to
    come, None if it was still running; error: why it failed.
    """

    scheduled: float
    sent: float | None = None
    times: list[float] = field(default_factory=list)
    ended: float | None = None
    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def completed(self) -> bool:
        return self.ended is not None and self.error is None

    @property
    def ttft(self) -> float | None:
        """From the scheduled arrival, so that a client that lags cannot hide what a user would have waited."""
        return self.times[0] - self.scheduled if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Between pieces of text, each of one token or several: ITL."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for fewer than two."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.times and self.output_tokens > 1 else None

    @property
    def e2e(self) -> float | None:
        return None if self.ended is None else self.ended - self.scheduled


@dataclass(frozen=True)
class Objective:
    """Bounds in seconds, None for none: on the first token, and on a request's mean time per later token."""

    ttft: float | None = None
    itl: float | None = None

    @property
    def given(self) -> bool:
        return self.ttft is not None or self.itl is not None

    def met_by(self, record: Record) -> bool:
        """A request that failed meets nothing; one with a single token has no later token to be late."""
        if not record.completed or record.ttft is None:
            return False
        in_time = self.ttft is None or record.ttft <= self.ttft
        return in_time and (self.itl is None or record.tpot is None or record.tpot <= self.itl)


def totals(records: Sequence[Record], seconds: float, objective: Objective) -> Row:
    """Counts and rates over a run that took `seconds`. Goodput: requests per second that met the objective, and their
    share of those that ended (well or badly)."""
    completed = [r for r in records if r.completed]
    failed = sum(r.error is not None for r in records)
    cached = [r.cached_tokens for r in completed if r.cached_tokens is not None]
    good = sum(objective.met_by(r) for r in completed)
    output = sum(r.output_tokens for r in completed)
    prompt = sum(r.prompt_tokens for r in completed)
    return {
        "seconds": seconds,
        "requests": len(records),
        "completed": len(completed),
        "failed": failed,
        "unfinished": len(records) - len(completed) - failed,
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output,
        "requests_per_second": len(completed) / seconds,
        "output_tokens_per_second": output / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "goodput": good / seconds if objective.given else None,
        "good_share": good / (len(completed) + failed) if objective.given and (completed or failed) else None,
    }


TIMES = (
    Column("what", "ms"),
    Column("n", "n"),
    Column("mean", "mean", 1e-3, 2),
    Column("p50", "p50", 1e-3, 2),
    Column("p90", "p90", 1e-3, 2),
    Column("p99", "p99", 1e-3, 2),
    Column("most", "max", 1e-3, 2),
)


def times_table(records: Iterable[Record]) -> Table:
    """TTFT and ITL (all gaps) over the requests that did not fail, ended or not; TPOT and E2E over those that came to
    their end; client lag over all that were sent."""
    sent = [r for r in records if r.sent is not None]
    answered = [r for r in sent if r.error is None]
    completed = [r for r in sent if r.completed]
    measured: dict[str, list[float]] = {
        "TTFT": [r.ttft for r in answered if r.ttft is not None],
        "ITL": [gap for r in answered for gap in r.gaps],
        "TPOT": [r.tpot for r in completed if r.tpot is not None],
        "E2E": [r.e2e for r in completed if r.e2e is not None],
        "client lag": [r.sent - r.scheduled for r in sent if r.sent is not None],
    }
    rows = [row_of(what, summarise(values)) for what, values in measured.items()]
    return Table("times", "latencies", TIMES, rows)


def row_of(what: str, summary: Summary | None) -> Row:
    names = [f.name for f in fields(Summary)]
    return {"what": what} | ({name: getattr(summary, name) for name in names} if summary else {"n": 0})


def errors_table(records: Iterable[Record]) -> Table:
    """How often each error came, the most frequent first."""
    counted = Counter(r.error for r in records if r.error is not None)
    rows: list[Row] = [{"count": count, "error": error} for error, count in counted.most_common()]
    return Table("errors", "errors", (Column("count", "count"), Column("error", "error")), rows)


TOTALS = (
    Column("requests", "requests"),
    Column("completed", "completed"),
    Column("failed", "failed"),
    Column("unfinished", "unfinished"),
    Column("seconds", "s", 1, 2),
    Column("prompt_tokens", "prompt tokens"),
    Column("cached_tokens", "cached"),
    Column("output_tokens", "output tokens"),
    Column("requests_per_second", "requests/s", 1, 2),
    Column("output_tokens_per_second", "output tokens/s"),
    Column("tokens_per_second", "all tokens/s"),
    Column("goodput", "goodput/s", 1, 2),
    Column("good_share", "good share", 1, 3),
)


def serving_tables(records: Sequence[Record], seconds: float, objective: Objective) -> list[Table]:
    """Totals, latencies and, if there are any, errors."""
    tables = [Table("totals", "totals", TOTALS, [totals(records, seconds, objective)]), times_table(records)]
    errors = errors_table(records)
    return [*tables, errors] if errors.rows else tables


def charts(records: Sequence[Record], objective: Objective) -> list[Chart]:
    """Shares of requests whose TTFT, and whose mean time per later token, is at most so long, with the bounds."""
    completed = [record for record in records if record.completed]
    first = sorted(1e3 * r.ttft for r in completed if r.ttft is not None)
    later = sorted(1e3 * r.tpot for r in completed if r.tpot is not None)
    return [
        _shares("time to first token", first, objective.ttft),
        _shares("mean time per later token", later, objective.itl),
    ]


def _shares(title: str, ordered: Sequence[float], bound: float | None) -> Chart:
    lines = [Line("requests", ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])]
    if bound is not None:
        lines.append(Line("bound", [1e3 * bound] * 2, [0, 1], dashed=True))
    return Chart(title, "milliseconds", "share of requests", lines)
