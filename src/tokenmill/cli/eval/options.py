"""The options that evaluations share: which variants, and of what model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.bench.output import command_line
from tokenmill.core.config import EngineConfig
from tokenmill.measure.quality.variants import Variant, parse_variants
from tokenmill.measure.report import Report, Value

if TYPE_CHECKING:
    from tokenmill.llm import LLM

Kv = Annotated[
    list[str] | None,
    typer.Option("--kv", help="A KV format, KEY/VALUE[:GROUP][:plain] such as int8/int4:64; may be given several times. First comes bf16."),
]
Sparse = Annotated[
    list[str] | None,
    typer.Option(
        help="A level of sparsification, STRATEGY:KEEP_RATIO[@SHARE] such as topk_heads:0.7, tried with every format; several times too."
    ),
]
BudgetMb = Annotated[
    float | None, typer.Option(help="With --sparse: MiB of KV of a request, which is sparsified near their end, or at a SHARE of them.")
]
File = Annotated[Path | None, typer.Option("--file", help="A text of one's own instead of those that come with Python.", metavar="FILE")]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens of each text that are read.")]
Window = Annotated[int, typer.Option(min=2, help="Tokens of a piece that is read on its own.")]

TOKENS, WINDOW = 8192, 1024


def chosen(kv: list[str] | None, sparse: list[str] | None, budget_mb: float | None, model: str) -> list[Variant]:
    """The variants, each of which the engine's configuration accepts: none turns out wrong after an hour. Raises `ConfigError`."""
    variants = parse_variants(kv or [], sparse or [], budget_mb)
    for variant in variants:
        EngineConfig.from_settings(model=model, **variant.settings)
    return variants


def begin(name: str, model: str, variants: Sequence[Variant], **settings: Value | list[int]) -> Report:
    report = Report.begin(name, command_line(), {"variants": ", ".join(v.name for v in variants), **settings}, family="eval")
    report.model = model
    return report


def describe(report: Report, llm: LLM) -> None:
    report.kernels, report.threads, report.cpus = llm.info.kernels, llm.info.threads, llm.info.cpus


def engine_settings(variant: Variant, threads: int, cpus: str | None, length: int, sequences: int) -> dict[str, Any]:
    """Of an engine for texts of up to `length` tokens, `sequences` at a time, none of which shares what another computed."""
    sharing = {"enable_prefix_sharing": False}
    return variant.settings | {
        "threads": threads,
        "cpus": cpus,
        "max_model_len": length,
        "max_batch_size": sequences,
        "block_manager_config": sharing,
    }
