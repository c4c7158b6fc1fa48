"""The options that evaluations share: which variants, and of what model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.bench.options import note
from tokenmill.cli.bench.output import command_line
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError, KVBudgetTooSmall
from tokenmill.core.kv_spelling import at_least
from tokenmill.measure.kv_model import KVModel
from tokenmill.measure.quality.budgets import Budgets
from tokenmill.measure.quality.variants import Variant, parse_variants
from tokenmill.measure.report import Report, Value

if TYPE_CHECKING:
    from tokenmill.llm import LLM, Usage

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
    """Of an engine for texts of up to `length` tokens, `sequences` at a time."""
    return variant.settings | {"threads": threads, "cpus": cpus, "max_model_len": length, "max_batch_size": sequences}


def check_budget(variants: Sequence[Variant], path: Path, certain: int, longest: int) -> None:
    """Raise `ConfigError` for a budget in which a text does not fit, or with which no variant gives anything up; one that does not is
    told of. certain: tokens that some text has at least; longest: that none exceeds with its answer.
    """
    useless = dict[str, str]()
    limited = [variant for variant in variants if variant.budget_mb is not None]
    for variant in limited:
        budgets, budget = _budgets(variant, path), variant.budget_mb or 0
        if not budgets.fits(budget, certain):
            raise _too_small(variant, f"{certain} tokens take at least {at_least(budgets.least(certain))}")
        if not budgets.sparsifies(budget, longest):
            useless[variant.name] = _useless(variant, budgets, longest)
    if useless and len(useless) == len(limited):
        raise ConfigError(f"--budget-mb: {'; '.join(useless.values())}", param="--budget-mb")
    for why in useless.values():
        note(f"--budget-mb: {why}")


@contextmanager
def within_budget(variant: Variant, path: Path, longest: int) -> Iterator[None]:
    """What a prompt that its budget cannot hold is told of as the option that sets it."""
    try:
        yield
    except KVBudgetTooSmall:
        if variant.budget_mb is None:
            raise
        least = at_least(_budgets(variant, path).least(longest))
        raise _too_small(variant, f"a prompt does not fit; {least} hold all that have up to {longest}") from None


def note_useless(variant: Variant, path: Path, usages: Sequence[Usage]) -> None:
    """Say so when a level gave nothing up in any of the answers."""
    if variant.budget_mb is not None and all(usage.kv.sparsified_from is None for usage in usages):
        longest = max(usage.prompt_tokens + usage.completion_tokens - 1 for usage in usages)  # the last token is never read
        note(f"NOTHING was sparsified, --budget-mb is too large: {_useless(variant, _budgets(variant, path), longest)}")


def _budgets(variant: Variant, path: Path) -> Budgets:
    return Budgets(KVModel.of(path, EngineConfig.from_settings(model=str(path), **variant.settings)))


def _too_small(variant: Variant, why: str) -> ConfigError:
    return ConfigError(f"--budget-mb is {variant.budget_mb:g}, but of {variant.name} {why}: raise it", param="--budget-mb")


def _useless(variant: Variant, budgets: Budgets, longest: int) -> str:
    most = budgets.most(longest)
    what = f"{variant.name} gives up nothing of texts of {longest} tokens"
    return f"{what}, which are too short for any" if most is None else f"{what}: it would with {math.floor(1000 * most) / 1000:.3f}"
