"""`tokenmill bench pd`"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from tokenmill.cli.bench import options
from tokenmill.cli.bench.output import Output, command_line
from tokenmill.cli.options import Cpus, Model, Threads
from tokenmill.core.config import HANDED_OVER
from tokenmill.core.cpus import parse_cpus, usable_cpus
from tokenmill.core.errors import ConfigError
from tokenmill.measure.limits import limits_table
from tokenmill.measure.report import Report, Table
from tokenmill.measure.separation import tables
from tokenmill.measure.separation.demand import Demand
from tokenmill.measure.separation.limits import limit_rows
from tokenmill.measure.separation.rounds import Rounds
from tokenmill.measure.separation.setups import parse_chunks, setups
from tokenmill.measure.serving import Objective
from tokenmill.models.loader import describe
from tokenmill.models.source import Source
from tokenmill.weights.catalogue import resolve

RATES, CHUNKS = "0.3", "64,128,256,512,paced"


def command(
    model: Model,
    streams: Annotated[int, typer.Option(min=1, max=256, help="Answers that grow all the time.")] = 8,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of the long prompts that arrive meanwhile, such as 512,2048.")] = "1024",
    rates: Annotated[str, typer.Option(help="Of those prompts: Poisson arrivals per second, such as 0.1,0.5.")] = RATES,
    prompts: Annotated[int, typer.Option(min=1, max=1024, help="Of those prompts, in each turn.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=4, help="Answers to the long prompts.")] = 16,
    stream_tokens: Annotated[int, typer.Option(min=8, help="After so many tokens a stream begins anew, with a short prompt.")] = 256,
    chunks: Annotated[
        str, typer.Option(help="Of mixed engines beside that with 2048: prompt tokens per step, or paced for as many as keep steps short.")
    ] = CHUNKS,
    prefill_chunk: Annotated[int, typer.Option(min=8, max=16384, help="Of the prefill worker: what goes over at a time.")] = HANDED_OVER,
    connector: Annotated[Literal["shm", "tcp"], typer.Option(help="By which KV gets to the decode worker.")] = "shm",
    slo_ttft: Annotated[float, typer.Option(help="Milliseconds: a request is good if its first token is in time.")] = 10_000,
    slo_itl: Annotated[float, typer.Option(help="Milliseconds: … and 99% of the gaps between its tokens are no longer.")] = 150,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each setup.")] = 1,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure what separating prefill from decode gains, and that it changes no answer.

    One prefill and one decode worker take turns with mixed engines that have the threads of both: each answers the same streams and the
    same long prompts, at the same times. An answer that differs ends it with an error.
    """
    output = Output(json, plot)
    lengths, per_second = options.numbers(prompt_tokens, "--prompt-tokens"), options.rates(rates, "--rates")
    rivals = parse_chunks(chunks)
    for option, value in (("--slo-ttft", slo_ttft), ("--slo-itl", slo_itl)):
        if not 0 < value < 1e9:
            raise ConfigError(f"{option} is {value:g}, but must be above 0", param=option)
    count = threads or len(parse_cpus(cpus, threads)) or len(usable_cpus())
    if count < 2:
        raise ConfigError(f"there is {count} thread for two workers: give --threads 2, or run where there are more CPUs", param="--threads")
    path = resolve(model)
    vocabulary = describe(Source.open(path))[0].vocab
    demands = [
        Demand(streams, stream_tokens, prompts, length, answer_tokens, rate, vocabulary, seed) for length in lengths for rate in per_second
    ]
    objective = Objective(slo_ttft / 1e3, slo_itl / 1e3)
    report = Report.begin("pd", command_line(), {"streams": streams, "prompt_tokens": lengths, "rates": rates, "prompts": prompts})
    report.settings |= {"answer_tokens": answer_tokens, "stream_tokens": stream_tokens, "chunks": chunks, "prefill_chunk": prefill_chunk}
    report.settings |= {"connector": connector, "slo_ttft": objective.ttft, "slo_itl": objective.itl, "rounds": rounds, "seed": seed}
    report.model = model
    with tempfile.TemporaryDirectory() as folder:
        found = setups(path, demands, rivals, prefill_chunk, count, cpus, _link(connector, Path(folder)))
        measured = Rounds(found, demands, rounds, options.note)
        with output.of(report, lambda: _tables(measured, objective), lambda: tables.charts(list(measured.setup_rows(objective)))):
            try:
                asyncio.run(measured.take())
            finally:
                if measured.kernels is not None:
                    report.threads, report.cpus, report.kernels = count, cpus, measured.kernels


def _link(connector: str, folder: Path) -> dict[str, str]:
    """Settings of a connector. folder: for a secret, if it needs one."""
    if connector == "shm":
        return {"connector": connector}
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(16))
    return {"connector": connector, "secret_file": str(secret)}


def _tables(measured: Rounds, objective: Objective) -> list[Table]:
    figures, transfers, best, limits = tables.setups_table(), tables.transfers_table(), tables.rivals_table(), limits_table()
    figures.rows.extend(measured.setup_rows(objective))
    transfers.rows.extend(measured.transfer_rows())
    best.rows.extend(tables.rival_rows(figures.rows))
    limits.rows.extend(limit_rows(figures.rows, transfers.rows))
    return [figures, transfers, best, limits]
