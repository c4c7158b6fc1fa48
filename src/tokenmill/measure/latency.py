"""First token and later ones, by length of the prompt and number of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.core.errors import InvalidRequest
from tokenmill.measure.costs import Costs
from tokenmill.measure.plot import Chart, Line
from tokenmill.measure.report import Ceilings, Column, Row, Table, by_key
from tokenmill.measure.serving import Record
from tokenmill.measure.targets import Target, now
from tokenmill.measure.workload import Ask, text_of
from tokenmill.observe.statistics import percentile, summarise


@dataclass(frozen=True)
class Grid:
    """Every prompt length (tokens, about) with every number of streams; `rounds` times each, `output` tokens each time."""

    prompts: Sequence[int]
    streams: Sequence[int]
    output: int
    rounds: int
    seed: int


def latency_table(with_floors: bool) -> Table:
    def shown(name: str) -> list[Column]:
        key = name.lower()
        columns = [Column(f"{key}_{p}", f"{name} {p}", 1e-3, 1 if name == "TTFT" else 2) for p in ("p50", "p90", "p99")]
        if with_floors:
            columns += [Column(f"{key}_floor", "floor", 1e-3, 1 if name == "TTFT" else 2), Column(f"{key}_ratio", "ratio", 1, 2)]
        return columns

    columns = [Column("streams", "streams"), Column("prompt_tokens", "prompt"), *shown("TTFT"), *shown("ITL")]
    return Table("latency", "milliseconds", [*columns, Column("tpot_p50", "TPOT p50", 1e-3, 2)])


async def measure_latency(target: Target, grid: Grid, floors: tuple[Costs, Ceilings] | None) -> AsyncIterator[Row]:
    """A row for each cell: in a round all its streams begin together, and the next round when all are done.

    Raises `InvalidRequest` with the first request's error that failed.
    """
    rng = np.random.default_rng(grid.seed)
    for streams in grid.streams:
        for prompt in grid.prompts:
            records: list[Record] = []
            for _ in range(grid.rounds):
                records += await send_together(target, [Ask(text_of(prompt, rng), grid.output) for _ in range(streams)])
            yield _row(records, streams, grid.output, floors)


async def send_together(target: Target, asks: Sequence[Ask]) -> list[Record]:
    """All at once; returns when all are done. Raises `InvalidRequest` with the first error of a request that failed."""
    records = [Record(now()) for _ in asks]
    await asyncio.gather(*(target.send(ask, record) for ask, record in zip(asks, records, strict=True)))
    for record in records:
        if record.error is not None:
            raise InvalidRequest(f"a request failed: {record.error}")
    return records


def _row(records: list[Record], streams: int, output: int, floors: tuple[Costs, Ceilings] | None) -> Row:
    first = summarise([r.ttft for r in records if r.ttft is not None])
    later = summarise([gap for r in records for gap in r.gaps])
    per_token = summarise([r.tpot for r in records if r.tpot is not None])
    prompt = round(percentile([r.prompt_tokens for r in records], 0.5))
    row: Row = {"streams": streams, "prompt_tokens": prompt, "requests": len(records)}
    for name, summary in (("ttft", first), ("itl", later)):
        row |= {f"{name}_{p}": getattr(summary, p) if summary else None for p in ("p50", "p90", "p99")}
    row["tpot_p50"] = per_token.p50 if per_token else None
    if floors is not None:
        costs, ceilings = floors
        # Prompts that arrive together wait for each other, so that only one alone has a floor of its own.
        ttft = costs.prefill_floor(ceilings, [prompt]) if streams == 1 else None
        itl = costs.decode_floor(ceilings, streams, prompt + output // 2)
        row |= {"ttft_floor": ttft, "itl_floor": itl}
        row |= {"ttft_ratio": ttft / first.p50 if ttft and first else None, "itl_ratio": itl / later.p50 if later else None}
    return row


def charts(table: Table) -> list[Chart]:
    """Medians: TTFT against the prompt for each number of streams, ITL against streams for each prompt, and its floor."""
    first = [
        Line(f"{streams} streams", [_number(r, "prompt_tokens") for r in rows], [1e3 * _number(r, "ttft_p50") for r in rows])
        for streams, rows in by_key(table.rows, "streams").items()
    ]
    later = []
    for prompt, rows in by_key(table.rows, "prompt_tokens").items():
        xs = [_number(r, "streams") for r in rows]
        later.append(Line(f"prompt {prompt}", xs, [1e3 * _number(r, "itl_p50") for r in rows]))
        if "itl_floor" in rows[0]:
            later.append(Line(f"floor {prompt}", xs, [1e3 * _number(r, "itl_floor") for r in rows], dashed=True))
    return [
        Chart("time to first token", "prompt tokens", "milliseconds", first, log_x=True, log_y=True),
        Chart("time between pieces of text", "streams", "milliseconds", later, log_x=True),
    ]


def _number(row: Row, key: str) -> float:
    return float(row[key] or 0)
