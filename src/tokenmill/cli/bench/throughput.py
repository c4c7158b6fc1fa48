"""`tokenmill bench throughput`"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli.bench import options
from tokenmill.cli.bench.output import Output, command_line
from tokenmill.cli.options import Cpus, Model, Threads
from tokenmill.core.errors import ConfigError
from tokenmill.kernels.native import Pool
from tokenmill.llm import LLM
from tokenmill.measure.offline import Job, measure_offline, offline_table
from tokenmill.measure.report import Ceilings, Report, Row
from tokenmill.measure.steps import ForwardPass, chart, engine_steps, steps_table
from tokenmill.measure.timing import measure_ceilings
from tokenmill.measure.workload import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, Lengths
from tokenmill.weights.catalogue import resolve

REQUESTS, PROMPT, OUTPUT = 64, "256", "128"
TAPE_PROMPT, TAPE_SIZES = 512, "1,16,32"
CONTEXT = 128


def command(
    model: Model,
    requests: Annotated[int | None, typer.Option(min=1, help=f"Prompts of the batch job; default: {REQUESTS}.")] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(help=f"N, LOW-HIGH or sharegpt; default: {PROMPT}, with --tape {TAPE_PROMPT}.")
    ] = None,
    output_tokens: Annotated[str | None, typer.Option(help=f"N, LOW-HIGH or sharegpt; default: {OUTPUT}.")] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Instead of a job: decode steps of so many sequences, such as 1,2,4,8,16,32,64.")
    ] = None,
    tape: Annotated[
        bool, typer.Option("--tape", help=f"Instead of a job: the forward pass alone; --batch-sizes default to {TAPE_SIZES}.")
    ] = False,
    context: Annotated[int | None, typer.Option(min=1, help=f"Tokens before those of a decode step; default: {CONTEXT}.")] = None,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure a batch job, or single steps by batch size.

    The job is all prompts at once through the Python API. --batch-sizes measures an engine's decode steps, --tape the
    forward pass without scheduler and sampler, and a prefill.
    """
    output = Output(json, plot)
    if tape:
        options.not_part_of("--tape", requests=requests, output_tokens=output_tokens)
    elif batch_sizes is not None:
        options.not_part_of("--batch-sizes", requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    else:
        options.not_part_of("a batch job, which has one batch", context=context, plot=plot)
    sizes = options.numbers(batch_sizes or TAPE_SIZES, "--batch-sizes", most=4096) if tape or batch_sizes else []
    prompts = Lengths.parse(prompt_tokens or (str(TAPE_PROMPT) if tape else PROMPT), "--prompt-tokens", SHAREGPT_PROMPT)
    outputs = Lengths.parse(output_tokens or OUTPUT, "--output-tokens", SHAREGPT_OUTPUT)
    if tape and prompts.low != prompts.high:
        raise ConfigError("--prompt-tokens must be one number with --tape: there is one prefill", param="--prompt-tokens")
    path, before = resolve(model), context or CONTEXT
    report = Report.begin("throughput", command_line(), {"seed": seed})
    if tape:
        table = steps_table("forward", "the forward pass alone")
        report.settings |= {"prompt_tokens": prompts.low, "batch_sizes": sizes, "context": before}
    elif sizes:
        table = steps_table("steps", "decode steps of an engine")
        report.settings |= {"batch_sizes": sizes, "context": before}
    else:
        table = offline_table()
        report.settings |= {"requests": requests or REQUESTS}
        report.settings |= {"prompt_tokens": prompt_tokens or PROMPT, "output_tokens": output_tokens or OUTPUT}
    with output.of(report, lambda: [table], lambda: [chart(table)]):
        pool = Pool(threads, cpus=cpus)
        report.model, report.kernels, report.threads, report.cpus = model, pool.variant, pool.threads, pool.cpus
        options.note("measuring the machine")
        ceilings = report.ceilings = measure_ceilings(pool)
        options.note(f"measuring {model}")
        if tape:
            table.rows.extend(_forward(path, pool, prompts.low, sizes, before, ceilings, seed))
        elif sizes:
            table.rows.extend(engine_steps(path, threads, sizes, before, ceilings, seed, cpus))
        else:
            table.rows.extend(_job(path, threads, cpus, prompts, outputs, requests or REQUESTS, ceilings, seed))


def _forward(path: Path, pool: Pool, prompt: int, sizes: list[int], context: int, ceilings: Ceilings, seed: int) -> Iterator[Row]:
    forward = ForwardPass(path, pool, prompt, max(sizes), context, seed)
    yield forward.prefill(ceilings)
    for streams in sizes:
        yield forward.decode(ceilings, streams)


def _job(
    path: Path, threads: int, cpus: str | None, prompts: Lengths, outputs: Lengths, requests: int, ceilings: Ceilings, seed: int
) -> list[Row]:
    with LLM(path, threads=threads, cpus=cpus, block_manager_config={"enable_prefix_sharing": False}) as llm:
        job = Job.draw(prompts, outputs, requests, llm.info.vocab_size, seed)
        return measure_offline(llm, path, job, ceilings)
