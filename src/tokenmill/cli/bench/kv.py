"""`tokenmill bench kv`"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.bench import options
from tokenmill.cli.bench.output import Output, command_line
from tokenmill.cli.options import Cpus, Model, Threads
from tokenmill.kernels.native import Pool
from tokenmill.measure import kv_formats, kv_pages, kv_sharing
from tokenmill.measure.kv_limits import limit_rows
from tokenmill.measure.kv_model import KVModel
from tokenmill.measure.limits import limits_table
from tokenmill.measure.report import Ceilings, Report, Table
from tokenmill.measure.timing import measure_ceilings
from tokenmill.weights.catalogue import resolve


def command(
    model: Model,
    users: Annotated[int, typer.Option(min=2, max=256, help="Users with the same system prompt.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Length of the system prompt.")] = 2000,
    question_tokens: Annotated[int, typer.Option(min=1, help="Length of each user's own question.")] = 32,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure what prefix sharing, page sizes and formats do for the KV cache.

    Users with one system prompt, with sharing and without: memory and times to the first token. Dynamic pages beside fixed sizes:
    page tables, unfilled positions, decode steps. What a position takes in each format. Then all that is promised of it.
    """
    output = Output(json, plot)
    path = resolve(model)
    shape, demand = KVModel.of(path), kv_sharing.Users(users, prompt_tokens, question_tokens, seed)
    budget = kv_sharing.room(shape, demand)
    settings = {"users": users, "prompt_tokens": prompt_tokens, "question_tokens": question_tokens, "seed": seed}
    report = Report.begin("kv", command_line(), dict(settings))
    sharing, pages, steps = kv_sharing.sharing_table(), kv_pages.pages_table(), kv_pages.steps_table()
    formats = kv_formats.formats_table()

    def tables() -> list[Table]:
        limits = limits_table()
        limits.rows.extend(limit_rows(sharing, pages, steps, formats))
        return [sharing, pages, steps, formats, limits]

    with output.of(report, tables, lambda: [*kv_sharing.charts(sharing), kv_pages.chart(steps), kv_formats.chart(formats)]):
        formats.rows.extend(kv_formats.format_rows(shape.head_dim, shape.pairs))
        pool = Pool(threads, cpus=cpus)
        report.model, report.kernels, report.threads, report.cpus = model, pool.variant, pool.threads, pool.cpus
        options.note("measuring the machine")
        report.ceilings = measure_ceilings(pool)
        options.note("counting pages")
        pages.rows.extend(kv_pages.page_rows(shape, seed))
        steps.rows.extend(kv_pages.measure_steps(path, shape, pool, report.ceilings, options.note))
        del pool
        options.note(f"measuring {users} users with one system prompt of {prompt_tokens} tokens")
        asyncio.run(_share(path, demand, budget, report.ceilings, threads, cpus, sharing))


async def _share(
    path: Path, users: kv_sharing.Users, budget: float, ceilings: Ceilings, threads: int, cpus: str | None, table: Table
) -> None:
    async for row in kv_sharing.measure_sharing(path, users, budget, ceilings, threads, cpus):
        table.rows.append(row)
