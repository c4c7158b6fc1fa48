"""`tokenmill bench kernels`"""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill.cli.bench import options
from tokenmill.cli.bench.output import Output, command_line
from tokenmill.cli.options import KV, Cpus, Kv, Threads
from tokenmill.core.config import EngineConfig
from tokenmill.core.kv_spelling import Format, kv_settings
from tokenmill.engine.cache import kv_format
from tokenmill.kernels.native import Pool
from tokenmill.measure.kernels import ROWS, OpTimer, attention_table, chart, input_table, linear_table
from tokenmill.measure.op_programs import LinearKind, ModelOps, ops_of, reference_ops
from tokenmill.measure.random_weights import QUANTISED, check_form, fits
from tokenmill.measure.report import Report
from tokenmill.measure.timing import measure_ceilings


def command(
    model: Annotated[str | None, typer.Argument(help="Whose shapes and weight forms; default: SmolLM2-135M's shapes in each form.")] = None,
    forms: Annotated[str | None, typer.Option(help="Without MODEL: weight forms, such as Q4_1,F16; default: all quantised ones.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows (M) of the linear ops.")] = ",".join(map(str, ROWS)),
    kv: Kv = KV,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: options.Seed = 0,
    json: options.Json = None,
    plot: options.Plot = None,
) -> None:
    """Measure single ops beside this machine's ceilings.

    First what the machine can do: reading memory, int8 and bf16 products. Then each op and shape of a model, with weights
    that are random and come from memory. Nothing is downloaded without MODEL.
    """
    output = Output(json, plot)
    counts = options.numbers(rows, "--rows", most=4096)
    if model is not None:
        options.not_part_of("measuring a MODEL, which has its own", forms=forms)
        ops = _of_model(model)
    else:
        ops = _of_forms([check_form(form, "--forms") for form in forms.split(",")] if forms else list(QUANTISED))
    cache = EngineConfig.from_settings(model="", **kv_settings(Format.parse(kv), None, None)).kv_cache_config
    pool = Pool(threads, cpus=cpus)
    report = Report.begin("kernels", command_line(), {"rows": counts, "kv": kv, "seed": seed})
    report.model, report.kernels, report.threads, report.cpus = model, pool.variant, pool.threads, pool.cpus
    linear, attention, inputs = linear_table(), attention_table(), input_table()
    with output.of(report, lambda: [linear, inputs, attention], lambda: [chart(linear, report.ceilings)]):
        options.note("measuring the machine")
        report.ceilings = ceilings = measure_ceilings(pool)
        timer = OpTimer(pool, ceilings, seed, kv_format(cache.compression, ops.shape.head_dim))
        for kind, per_pass in ops.linear.items():
            options.note(f"measuring {kind.name} {kind.form}")
            linear.rows.extend(timer.linear(kind, per_pass, counts))
        for kind in _inputs(ops):
            options.note(f"measuring {'norm + ' if kind.normed else ''}quantise, {kind.cols} wide")
            inputs.rows.extend(timer.input(kind, counts))
        options.note("measuring attention")
        attention.rows.extend(timer.attention(ops))


def _of_model(model: str) -> ModelOps:
    from tokenmill.models.source import Source
    from tokenmill.weights.catalogue import resolve

    return ops_of(Source.open(resolve(model)))


def _of_forms(forms: list[str]) -> ModelOps:
    """The reference shapes in each form in which they are whole blocks."""
    every = [reference_ops(form) for form in forms]
    kinds = {kind: count for ops in every for kind, count in ops.linear.items() if all(fits(p.form, p.cols) for p in kind.parts)}
    return ModelOps(kinds, every[0].shape, every[0].window, every[0].context)


def _inputs(ops: ModelOps) -> list[LinearKind]:
    """One linear op for each kind of input."""
    found = {(kind.normed, kind.cols): kind for kind in ops.linear if fits("Q8_0", kind.cols)}
    return list(found.values())
