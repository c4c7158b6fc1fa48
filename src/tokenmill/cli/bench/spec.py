"""`tokenmill bench spec`"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.cli.bench import options
from tokenmill.cli.bench.output import Output, command_line
from tokenmill.cli.options import Cpus, Model, Threads
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.loading import load_model
from tokenmill.measure.limits import limits_table
from tokenmill.measure.report import Report, Table
from tokenmill.measure.speculation import tables
from tokenmill.measure.speculation.limits import limit_rows
from tokenmill.measure.speculation.prompts import MOST, WORKLOADS, Workload, parse_workloads
from tokenmill.measure.speculation.runs import PLAIN, Case, Method, chat_requests, measure_case, open_methods
from tokenmill.measure.timing import measure_ceilings
from tokenmill.weights.catalogue import resolve

LOOKING_UP, DRAFTING = ("ngram", "suffix"), ("draft", "combined")
LENGTHS = ", ".join(f"{name} {workload.tokens}" for name, workload in WORKLOADS.items())
DRAFT = EngineConfig(model="").speculative_config.num_speculative_tokens


def command(
    model: Model,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model of the same vocabulary, for the methods that need one.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Such as ngram,suffix; default: these, with --draft-model draft,combined too. First comes none.")
    ] = None,
    workloads: Annotated[str, typer.Option(help="What is asked for.")] = ",".join(WORKLOADS),
    streams: Annotated[str, typer.Option(help="Numbers of requests at a time.")] = "1,4,16",
    prompts: Annotated[int, typer.Option(min=1, max=MOST, help="Of each workload, at least; as many as streams.")] = 4,
    tokens: Annotated[
        int | None, typer.Option(min=2, help=f"Length of the answers, at most; default: {LENGTHS}.", show_default=False)
    ] = None,
    draft_tokens: Annotated[int, typer.Option(help="Tokens of a draft, at most.")] = DRAFT,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is measured.")] = 3,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure what speculation gains, and that it changes no answer.

    Every method answers the same prompts in turn, over the same weights, and plain decoding does. Beside the speed-up stands what
    theory says of it, from acceptance and the measured costs of steps. An answer that is not the plain one ends it with an error.
    """
    output = Output(json, plot)
    counts, asked = options.numbers(streams, "--streams", most=MOST), parse_workloads(workloads)
    names = _methods(methods, draft_model)
    SamplingParams(temperature=temperature).check()
    settings = {name: _settings(name, draft_model, draft_tokens) for name in names}
    for each in settings.values():
        EngineConfig.from_settings(model=model, **each)
    report = Report.begin("spec", command_line(), {"streams": counts, "prompts": prompts, "tokens": tokens})
    report.settings |= {"methods": ", ".join(names), "workloads": ", ".join(asked), "draft_model": draft_model, "rounds": rounds}
    report.settings |= {"draft_tokens": draft_tokens, "temperature": temperature, "seed": seed}
    table, positions, costs = tables.speculation_table(), tables.positions_table(draft_tokens), tables.costs_table(names)
    cases: list[Case] = []
    opened: dict[str, Method] = {}

    def finished() -> list[Table]:
        limits = limits_table()
        limits.rows.extend(limit_rows(table.rows))
        costs.rows.extend(tables.cost_rows(cases, {name: method.costs for name, method in opened.items() if method.costs is not None}))
        return [table, positions, costs, limits]

    with output.of(report, finished, lambda: tables.charts(cases, table, draft_tokens)), ExitStack() as engines:
        path = resolve(model)
        number = max(prompts, *counts)
        requests = {name: _requests(path, WORKLOADS[name], number, tokens, temperature, seed) for name in asked}
        room = max(_longest(each) for each in requests.values())
        shared: dict[str, Any] = {"threads": threads, "cpus": cpus, "max_model_len": room, "max_batch_size": max(counts)}
        configs = {name: EngineConfig.from_settings(model=str(path), **each, **shared) for name, each in settings.items()}
        loaded = load_model(configs[PLAIN])
        report.model, report.kernels, report.threads, report.cpus = model, loaded.pool.variant, loaded.pool.threads, loaded.pool.cpus
        options.note("measuring the machine")
        report.ceilings = measure_ceilings(loaded.pool)
        opened |= open_methods(configs, loaded, engines)
        for workload in asked:
            for count in counts:
                case = measure_case(opened, workload, count, requests[workload][: count * max(1, prompts // count)], rounds, options.note)
                cases.append(case)
                table.rows.extend(tables.case_rows(case))
                positions.rows.extend(tables.position_rows(case))


def _methods(given: str | None, draft_model: str | None) -> list[str]:
    """`PLAIN` and those that are asked for. Raises `ConfigError`."""
    if given is None:
        return [PLAIN, *LOOKING_UP, *(DRAFTING if draft_model else ())]
    names = list(dict.fromkeys(part.strip() for part in given.split(",")))
    for name in names:
        if name in DRAFTING and draft_model is None:
            raise ConfigError(f"--methods: {name} needs --draft-model", param="--draft-model")
    if not set(names) & set(DRAFTING):
        options.not_part_of(f"--methods {given}", draft_model=draft_model)
    return [PLAIN, *(name for name in names if name != PLAIN)]


def _settings(method: str, draft_model: str | None, tokens: int) -> dict[str, Any]:
    """Those of `EngineConfig`."""
    if method == PLAIN:
        return {}
    chosen = {"method": method, "num_speculative_tokens": tokens}
    return {"speculative_config": chosen | ({"model": str(resolve(draft_model))} if method in DRAFTING and draft_model else {})}


def _requests(path: Path, workload: Workload, number: int, tokens: int | None, temperature: float, seed: int) -> list[Generate]:
    length = workload.tokens if tokens is None else min(tokens, workload.tokens)
    return chat_requests(path, [workload.prompt(i) for i in range(number)], length, temperature, seed)


def _longest(requests: Sequence[Generate]) -> int:
    """Tokens of prompt and answer."""
    return max(len(request.prompt) + (request.params.max_tokens or 0) for request in requests)
