"""`tokenmill calibrate`"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from tokenmill.cli.options import Cpus, Model, Threads, note
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.engine.calibrate import calibrate
from tokenmill.engine.loading import load_model
from tokenmill.models.calibration import Calibration, calibration_path, check_place, write_calibration
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer

SHOWN = 12
"""Heads that the table lists."""


class Head(msgspec.Struct, frozen=True):
    """A KV head. score: the share of its attention that finds the earlier occurrence of what it reads."""

    layer: int
    head: int
    score: float


class Report(msgspec.Struct, frozen=True):
    """spread: the widest channel's range over the median one's, of the head where it is greatest; offset: the largest constant part of
    a channel in units of its range. retrieval: all heads, those that retrieve first."""

    path: str
    digest: str
    layers: int
    kv_heads: int
    head_dim: int
    spread: float
    offset: float
    seconds: float
    retrieval: list[Head]


def command(
    model: Model,
    threads: Threads = 0,
    cpus: Cpus = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the range of a model's keys and which heads look far back.

    What is found is stored beside the model, in place of what was there, for compressed KV and sparse attention.
    """
    path = resolve(model)
    stored = calibration_path(path)
    with _storing(stored):
        check_place(stored)
    loaded = load_model(EngineConfig.from_settings(model=str(path), threads=threads, cpus=cpus))
    begun = time.monotonic()
    found = calibrate(loaded.model, load_tokenizer(path), loaded.pool, _notes())
    seconds = time.monotonic() - begun
    with _storing(stored):
        write_calibration(stored, found, loaded.digest.result())
    report = _report(found, str(stored), seconds)
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if json else _table(report))


@contextmanager
def _storing(stored: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{stored} cannot be written: {error.strerror}: make its folder writable, or link to the model from one that is"
        ) from None


def _notes() -> Callable[[int, int], None]:
    """A line whenever another quarter is done."""
    quarters = 0

    def tell(done: int, total: int) -> None:
        nonlocal quarters
        if 4 * done // total > quarters:
            quarters = 4 * done // total
            note(f"calibrating: {25 * quarters}%")

    return tell


def _report(found: Calibration, path: str, seconds: float) -> Report:
    layers, kv_heads, head_dim = found.keys.factor.shape
    spread = found.keys.factor.max(axis=2) / np.median(found.keys.factor, axis=2)
    return Report(
        path=path,
        digest=found.digest,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        spread=float(spread.max()),
        offset=float((np.abs(found.keys.zero) / found.keys.factor).max()),
        seconds=seconds,
        retrieval=[Head(layer, head, float(found.retrieval[layer, head])) for layer, head in found.ranked()],
    )


def _table(report: Report) -> str:
    heads = report.retrieval
    lines = [
        f"keys: {report.layers} layers x {report.kv_heads} KV heads x {report.head_dim} channels; the widest channel is "
        f"{report.spread:.1f} times the median one of its head, the largest offset {report.offset:.1f} times its channel's range",
        f"attention to the earlier occurrence, {len(heads)} heads: median {heads[len(heads) // 2].score:.3f}",
        "",
        "layer  head  score",
        *(f"{h.layer:5}  {h.head:4}  {h.score:5.3f}" for h in heads[:SHOWN]),
        "",
        f"stored in {report.path} after {report.seconds:.1f} s",
    ]
    return "\n".join(lines)
