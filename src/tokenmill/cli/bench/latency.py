"""`tokenmill bench latency`"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill.cli.bench import options
from tokenmill.cli.bench.output import Output, command_line
from tokenmill.cli.options import Cpus, Threads
from tokenmill.measure.latency import Grid, charts, latency_table, measure_latency
from tokenmill.measure.report import Ceilings, Report, Table, Value
from tokenmill.measure.targets import EngineTarget, ServerTarget, Target

if TYPE_CHECKING:
    from tokenmill.measure.costs import Costs


def command(
    model: options.OptionalModel = None,
    url: options.Url = None,
    served_model: options.ServedModel = None,
    api_key: options.ApiKey = None,
    endpoint: options.Endpoint = None,
    ignore_eos: options.IgnoreEos = None,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of the prompts, about.")] = "32,128,512",
    streams: Annotated[str, typer.Option(help="Numbers of requests at a time.")] = "1,4,16",
    output_tokens: Annotated[int, typer.Option(min=2, help="Length of the answers.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured.")] = 5,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure the time to the first token and between tokens.

    For each number of streams and length of prompt, requests of random words begin together, and the next ones when
    all are answered. MODEL runs in this process, without HTTP, and has floors beside the figures.
    """
    options.one_target(model, url)
    if url is None:
        options.not_part_of("measuring a MODEL in this process", model=served_model, endpoint=endpoint, ignore_eos=ignore_eos)
    else:
        options.not_part_of("measuring --url", threads=threads or None, cpus=cpus)
    output = Output(json, plot)
    lengths, counts = options.numbers(prompt_tokens, "--prompt-tokens"), options.numbers(streams, "--streams", most=4096)
    grid = Grid(lengths, counts, output_tokens, rounds, seed)
    settings: dict[str, Value | list[int]] = {"prompt_tokens": lengths, "streams": counts, "output_tokens": output_tokens, "rounds": rounds}
    report = Report.begin("latency", command_line(), settings | {"seed": seed})
    table = latency_table(with_floors=model is not None)
    with output.of(report, lambda: [table], lambda: charts(table)):
        if model is not None:
            asyncio.run(_in_process(model, threads, cpus, grid, report, table))
        else:
            server = ServerTarget(str(url), served_model, api_key, endpoint or "completions", ignore_eos is not False)
            asyncio.run(_of_server(server, grid, report, table))


async def _in_process(model: str, threads: int, cpus: str | None, grid: Grid, report: Report, table: Table) -> None:
    from tokenmill.kernels.native import Pool
    from tokenmill.llm import AsyncLLM
    from tokenmill.measure.costs import Costs
    from tokenmill.measure.timing import measure_ceilings
    from tokenmill.weights.catalogue import resolve

    path = resolve(model)
    options.note("measuring the machine")
    pool = Pool(threads, cpus=cpus)
    report.ceilings = ceilings = measure_ceilings(pool)
    report.model, report.kernels, report.threads, report.cpus = model, pool.variant, pool.threads, pool.cpus
    async with AsyncLLM(path, threads=threads, cpus=cpus, max_batch_size=max(grid.streams)) as llm:
        del pool
        await _measure(EngineTarget(llm), grid, (Costs.of(path), ceilings), table)


async def _of_server(server: ServerTarget, grid: Grid, report: Report, table: Table) -> None:
    async with server:
        await server.check()
        report.url, report.model = server.base, server.model
        await _measure(server, grid, None, table)


async def _measure(target: Target, grid: Grid, floors: tuple[Costs, Ceilings] | None, table: Table) -> None:
    options.note(f"measuring {len(grid.streams) * len(grid.prompts)} cases")
    async for row in measure_latency(target, grid, floors):
        table.rows.append(row)
