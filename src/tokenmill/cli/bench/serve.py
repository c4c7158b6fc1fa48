"""`tokenmill bench serve`"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tokenmill.cli.bench import options
from tokenmill.cli.bench.output import Output, command_line
from tokenmill.cli.options import Cpus, Threads
from tokenmill.core.errors import ConfigError
from tokenmill.measure.load import Load
from tokenmill.measure.report import Report, Value
from tokenmill.measure.server import OwnServer
from tokenmill.measure.serving import Objective, charts, serving_tables
from tokenmill.measure.targets import ServerTarget
from tokenmill.measure.workload import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, Lengths, Workload

REQUESTS, CONCURRENCY = 64, 8


def command(
    model: options.OptionalModel = None,
    url: options.Url = None,
    served_model: options.ServedModel = None,
    api_key: options.ApiKey = None,
    endpoint: options.Endpoint = None,
    ignore_eos: options.IgnoreEos = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: Poisson arrivals, so many a second, that wait for nothing.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help=f"Closed loop: so many clients, each with its next request; default: {CONCURRENCY}.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help=f"Requests in all; default: {REQUESTS}, or what --duration allows.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds after which no request begins any more.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="N, LOW-HIGH or sharegpt: about so many tokens of a prompt's own.")] = "sharegpt",
    output_tokens: Annotated[str, typer.Option(help="N, LOW-HIGH or sharegpt.")] = "sharegpt",
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens, about, that the prompts of a group begin with.")] = 0,
    prefix_groups: Annotated[int, typer.Option(min=1, help="Number of such groups.")] = 1,
    slo_ttft: Annotated[float | None, typer.Option(help="Milliseconds: goodput counts requests whose first token is in time.")] = None,
    slo_itl: Annotated[float | None, typer.Option(help="Milliseconds: … whose later tokens take no longer on average.")] = None,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Put a load on a server and measure what clients see.

    MODEL is served by a `tokenmill serve` of its own on a free port; --url takes any OpenAI-compatible server. Ctrl-C
    shows what was measured until then.
    """
    options.one_target(model, url)
    if url is None:
        options.not_part_of("measuring a MODEL of one's own", model=served_model)
    else:
        options.not_part_of("measuring --url", threads=threads or None, cpus=cpus)
    output = Output(json, plot)
    if rate is not None and concurrency is not None:
        raise ConfigError("give --rate (open loop) or --concurrency (closed loop), not both", param="--rate")
    for option, value in (("--rate", rate), ("--duration", duration), ("--slo-ttft", slo_ttft), ("--slo-itl", slo_itl)):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"{option} is {value:g}, but must be above 0", param=option)
    clients = None if rate is not None else concurrency or CONCURRENCY
    most = requests if requests is not None or duration is not None else REQUESTS
    objective = Objective(*(None if ms is None else ms / 1e3 for ms in (slo_ttft, slo_itl)))
    prompts = Lengths.parse(prompt_tokens, "--prompt-tokens", SHAREGPT_PROMPT)
    outputs = Lengths.parse(output_tokens, "--output-tokens", SHAREGPT_OUTPUT)
    work = Workload(prompts, outputs, seed, rate, shared_prefix, prefix_groups)
    settings: dict[str, Value | list[int]] = {
        "rate": rate,
        "concurrency": clients,
        "requests": most,
        "duration": duration,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "shared_prefix": shared_prefix,
        "prefix_groups": prefix_groups,
        "slo_ttft": objective.ttft,
        "slo_itl": objective.itl,
        "endpoint": endpoint or "completions",
        "ignore_eos": ignore_eos is not False,
        "seed": seed,
    }
    report = Report.begin("serve", command_line(), settings)
    load = Load(most, duration)

    def measure(at: str, name: str | None, key: str | None) -> None:
        asyncio.run(_put(load, ServerTarget(at, name, key, endpoint or "completions", ignore_eos is not False), work, clients))

    with output.of(report, lambda: serving_tables(load.records, load.seconds, objective), lambda: charts(load.records, objective)):
        if url is not None:
            report.url, report.model = url, served_model
            measure(url, served_model, api_key)
        elif model is not None:
            options.note(f"starting a server with {model}")
            report.model = model
            with OwnServer(model, threads, cpus) as own:
                report.threads, report.cpus, report.kernels = own.threads, cpus, own.kernels
                measure(own.url, None, None)


async def _put(load: Load, server: ServerTarget, work: Workload, clients: int | None) -> None:
    async with server:
        await server.check()
        options.note("measuring (Ctrl-C ends it)")
        if clients is None:
            await load.open_loop(server, work.asks())
        else:
            await load.closed_loop(server, work.asks(), clients)
