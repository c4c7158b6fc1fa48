"""The result as rows and charts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from tokenmill.measure.plot import Bars, Chart, Line, Picture
from tokenmill.measure.report import Column, Row, Table, by_key
from tokenmill.measure.separation.demand import Demand
from tokenmill.measure.separation.setups import ARTICLE, SEPARATED, mixed_name
from tokenmill.measure.separation.turns import Turn
from tokenmill.measure.serving import Objective
from tokenmill.observe.statistics import percentile, summarise

Point = tuple[int, float]
"""Tokens of the long prompts, and how many arrive per second."""


def setups_table() -> Table:
    columns = (
        Column("prompt_tokens", "prompt"),
        Column("rate", "prompts/s", 1, 2),
        Column("setup", "setup"),
        Column("itl_p50", "ITL p50", 1e-3, 1),
        Column("itl_p99", "p99", 1e-3, 1),
        Column("itl_most", "max", 1e-3, 1),
        Column("late", "late %", 0.01, 1),
        Column("ttft_p50", "TTFT p50", 1e-3),
        Column("ttft_p99", "p99", 1e-3),
        Column("output_tokens_per_second", "output tokens/s", 1, 1),
        Column("tokens_per_second", "all tokens/s", 1, 1),
        Column("good_share", "good share", 1, 3),
        Column("worker_cpus", "CPUs", 1, 2),
        Column("gateway_cpus", "load's", 1, 2),
    )
    return Table("setups", "streams that decode (ITL) and long prompts that arrive meanwhile (TTFT), milliseconds", columns)


def transfers_table() -> Table:
    columns = (
        Column("prompt_tokens", "prompt"),
        Column("rate", "prompts/s", 1, 2),
        Column("prompts", "prompts"),
        Column("handed_over", "handed over"),
        Column("chunks", "chunks", 1, 1),
        Column("bytes", "MB", 1e6, 2),
        Column("bytes_per_second", "GB/s", 1e9, 2),
        Column("seconds", "copying ms", 1e-3, 2),
        Column("waited", "waited ms", 1e-3, 2),
        Column("hidden", "hidden", 1, 3),
        Column("exposed_p50", "exposed p50", 1e-3, 2),
        Column("exposed_p99", "p99", 1e-3, 2),
    )
    return Table("transfers", "KV frames from prefill to decode worker, per prompt that was handed over", columns)


def rivals_table() -> Table:
    columns = (
        Column("prompt_tokens", "prompt"),
        Column("rate", "prompts/s", 1, 2),
        Column("by", "best by"),
        Column("setup", "mixed"),
        Column("mixed", "is", 1, 3),
        Column("separated", "separated", 1, 3),
        Column("ratio", "times better", 1, 2),
    )
    return Table("rivals", "the best mixed engine beside separation; ITL in seconds", columns)


def point_of(demand: Demand) -> Point:
    return demand.prompt_tokens, demand.rate


def setup_row(name: str, turns: Sequence[Turn], objective: Objective) -> Row:
    """All rounds of a setup at one point together. late: share of the streams' time that they spent in gaps longer than the objective."""
    demand = turns[0].demand
    seconds = sum(turn.seconds for turn in turns)
    gaps = [gap for turn in turns for gap in turn.stream_gaps]
    late = sum(gap for gap in gaps if objective.itl is not None and gap > objective.itl)
    later = summarise(gaps)
    first = summarise([ttft for turn in turns for asked in turn.asked if asked.long and (ttft := asked.record.ttft) is not None])
    output = sum(_output(turn) for turn in turns)
    verdicts = [verdict for turn in turns for verdict in _verdicts(turn, objective)]
    return {
        "prompt_tokens": demand.prompt_tokens,
        "rate": demand.rate,
        "setup": name,
        "rounds": len(turns),
        "streams": demand.streams,
        "seconds": seconds,
        "prompts": sum(turn.demand.prompts for turn in turns),
        "gaps": later.n if later else 0,
        "itl_p50": later.p50 if later else None,
        "itl_p99": later.p99 if later else None,
        "itl_most": later.most if later else None,
        "late": _ratio(late, sum(gaps)),
        "ttft_p50": first.p50 if first else None,
        "ttft_p99": first.p99 if first else None,
        "output_tokens_per_second": output / seconds,
        "tokens_per_second": (output + sum(_prompts(turn) for turn in turns)) / seconds,
        "requests": len(verdicts),
        "good_share": sum(verdicts) / len(verdicts) if verdicts else None,
        "worker_cpus": sum(turn.worker_seconds for turn in turns) / seconds,
        "gateway_cpus": sum(turn.gateway_seconds for turn in turns) / seconds,
    }


def transfer_row(turns: Sequence[Turn]) -> Row:
    """Of separation, all rounds at one point together; means per prompt."""
    demand = turns[0].demand
    found = [turn.transfers for turn in turns if turn.transfers is not None]
    count = sum(each.prompts for each in found)
    nbytes, seconds, waited = (sum(getattr(each, of) for each in found) for of in ("nbytes", "seconds", "waited"))
    exposed = summarise([value for each in found for value in each.exposed])
    return {
        "prompt_tokens": demand.prompt_tokens,
        "rate": demand.rate,
        "prompts": sum(turn.demand.prompts for turn in turns),
        "handed_over": count,
        "chunks": _ratio(sum(each.reads for each in found), count),
        "bytes": _ratio(nbytes, count),
        "bytes_per_second": _ratio(nbytes, seconds),
        "seconds": _ratio(seconds, count),
        "waited": _ratio(waited, count),
        "hidden": None if not seconds else 1 - waited / seconds,
        "exposed_p50": exposed.p50 if exposed else None,
        "exposed_p99": exposed.p99 if exposed else None,
    }


def rival_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """For each point: the mixed setup with the lowest ITL, and the one with the highest share of good requests (of those, the one with
    the lowest ITL). rows: of `setups`; points of which setups are missing are left out."""
    for at in _points(rows):
        found = {str(row["setup"]): row for row in at}
        mixed = [row for name, row in found.items() if name != SEPARATED]
        if SEPARATED not in found or not mixed:
            continue
        separated = found[SEPARATED]
        point: Row = {key: separated[key] for key in ("prompt_tokens", "rate")}
        best = min(mixed, key=lambda row: number(row, "itl_p99"))
        ratio = _ratio(number(best, "itl_p99"), number(separated, "itl_p99"))
        yield point | {"by": "ITL p99", "setup": best["setup"], "mixed": best["itl_p99"], "separated": separated["itl_p99"], "ratio": ratio}
        best = max(mixed, key=lambda row: (number(row, "good_share"), -number(row, "itl_p99")))
        ratio = _ratio(number(separated, "good_share"), number(best, "good_share"))
        shares: Row = {"mixed": best["good_share"], "separated": separated["good_share"], "ratio": ratio}
        yield point | {"by": "good share", "setup": best["setup"]} | shares


def charts(rows: Sequence[Row]) -> list[Picture]:
    """Over what varies, rates or else lengths of prompts: ITL, TTFT and the share of good requests, and where separation and the best
    mixed engine cross. Bars if there is one point only."""
    points = _points(rows)
    if len(points) < 2:
        return _bars(points[0]) if points else []
    key, other = ("rate", "prompt_tokens") if len(by_key(rows, "rate")) > 1 else ("prompt_tokens", "rate")
    pictures: list[Picture] = []
    for fixed, alike in by_key(rows, other).items():
        what = f"{fixed:g} prompts/s" if other == "rate" else f"prompts of {fixed} tokens"
        label = "long prompts per second" if key == "rate" else "tokens of the long prompts"
        for of, title, unit in (("itl_p99", "ITL p99", 1e3), ("ttft_p50", "TTFT p50", 1e3), ("good_share", "share of good requests", 1.0)):
            pictures.append(_chart(f"{title}, {what}", label, alike, key, of, unit))
    return pictures


def _chart(title: str, label: str, rows: Sequence[Row], key: str, of: str, unit: float) -> Chart:
    lines = [
        Line(str(name), [number(row, key) for row in each], [unit * number(row, of) for row in each])
        for name, each in by_key(rows, "setup").items()
    ]
    heights = [y for line in lines for y in line.ys]
    lines += [Line(f"crossing at {x:.3g}", [x, x], [min(heights), max(heights)], dashed=True) for x in crossings(rows, key, of)]
    share = unit == 1.0
    return Chart(title, label, "share" if share else "milliseconds", lines, log_y=not share)


def crossings(rows: Sequence[Row], key: str, of: str) -> list[float]:
    """Values of `key`, between those that were measured, where separation stops or begins to be better than the best mixed engine."""
    best = max if of == "good_share" else min
    leads: list[tuple[float, float]] = []
    for x, at in sorted(by_key(rows, key).items(), key=lambda item: number({key: item[0]}, key)):
        own = [number(row, of) for row in at if row["setup"] == SEPARATED]
        mixed = [number(row, of) for row in at if row["setup"] != SEPARATED]
        if own and mixed:
            leads.append((number({key: x}, key), own[0] - best(mixed)))
    found = []
    for (x, lead), (next_x, next_lead) in pairwise(leads):
        if lead * next_lead < 0:
            found.append(x + (next_x - x) * lead / (lead - next_lead))
    return found


def _bars(rows: Sequence[Row]) -> list[Picture]:
    names = [str(row["setup"]) for row in rows]

    def values(of: Mapping[str, str], unit: float) -> dict[str, list[float | None]]:
        return {label: [None if row[key] is None else unit * number(row, key) for row in rows] for label, key in of.items()}

    return [
        Bars("between tokens of streams", "milliseconds", names, values({"p50": "itl_p50", "p99": "itl_p99"}, 1e3)),
        Bars("to the first token of long prompts", "milliseconds", names, values({"p50": "ttft_p50", "p99": "ttft_p99"}, 1e3)),
        Bars("requests within the objectives", "share", names, values({"share": "good_share"}, 1.0)),
    ]


def stalls_count(row: Row) -> bool:
    """Whether each long prompt that holds up all streams once would be seen at the 99th percentile of their gaps."""
    return number(row, "prompts") * number(row, "streams") >= 0.01 * number(row, "gaps")


def article_row(rows: Sequence[Row]) -> Row | None:
    """Of the mixed engine in the article's form."""
    return next((row for row in rows if row["setup"] == mixed_name(ARTICLE)), None)


def number(row: Row, key: str) -> float:
    return float(row[key] or 0)


def _points(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by point."""
    found: dict[tuple[float, float], list[Row]] = {}
    for row in rows:
        found.setdefault((number(row, "prompt_tokens"), number(row, "rate")), []).append(row)
    return list(found.values())


def _verdicts(turn: Turn, objective: Objective) -> Iterator[bool]:
    """Whether each request had its first token in time, and 99% of the gaps between its tokens were short enough. Those of streams that
    had no token yet when the turn ended are left out."""
    for asked in turn.asked:
        ttft, gaps = asked.record.ttft, turn.gaps(asked)
        if ttft is None or not gaps:
            continue
        in_time = objective.ttft is None or ttft <= objective.ttft
        yield in_time and (objective.itl is None or percentile(gaps, 0.99) <= objective.itl)


def _output(turn: Turn) -> int:
    return sum(turn.start <= at < turn.until for asked in turn.asked for at in asked.record.times)


def _prompts(turn: Turn) -> int:
    """Tokens of prompts whose first token came in what counts."""
    begun = [asked for asked in turn.asked if asked.record.times and turn.start <= asked.record.times[0] < turn.until]
    return sum(asked.record.prompt_tokens for asked in begun)


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
