"""What a variant says of every next token of a text, beside what the reference says. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill.measure.plot import Bars, Chart, Line, Picture
from tokenmill.measure.quality.variants import REFERENCE
from tokenmill.measure.report import Column, Row, Table, Value

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

CONFIDENCE = 1.96
"""Standard errors on either side of a mean: 95%."""

ALL = "all"
"""Name of the row over all texts."""


class Block(NamedTuple):
    """Consecutive positions, one number each. nll and base: nats of the true next token, by the variant and by the reference; kl:
    Kullback-Leibler divergence of the variant's distribution from the reference's, nats; same: both have the same first choice."""

    position: npt.NDArray[np.int64]
    base: F64
    nll: F64
    kl: F64
    same: npt.NDArray[np.bool_]


def log_softmax(logits: F32) -> F32:
    """By row, float32; the normaliser is summed in float64."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    normaliser: F64 = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    found: F32 = shifted - normaliser.astype(np.float32)
    return found


def compare(reference: F32, variant: F32, targets: Sequence[int], first: int) -> Block:
    """reference, variant: log-probabilities [positions, vocabulary]. targets: the true next tokens. first: position of row 0."""
    rows = np.arange(len(targets))
    kl = (np.exp(reference) * (reference - variant)).sum(axis=1, dtype=np.float64)
    return Block(
        position=first + rows,
        base=-reference[rows, targets].astype(np.float64),
        nll=-variant[rows, targets].astype(np.float64),
        kl=kl,
        same=reference.argmax(axis=1) == variant.argmax(axis=1),
    )


@dataclass
class Track:
    """All that is known of one variant on one text. kv_bytes: of KV per token. sparsified: windows of which something was given up."""

    text: str
    variant: str
    kv_bytes: int
    blocks: list[Block] = field(default_factory=list)
    sparsified: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(block.nll) for block in self.blocks)


class Estimate(NamedTuple):
    """A mean and the ends of its 95% confidence interval."""

    mean: float
    low: float
    high: float


def estimate(blocks: Sequence[F64]) -> Estimate:
    """Of the mean of all numbers. Neighbouring positions resemble each other, so blocks are taken as the independent units."""
    sizes = np.array([len(block) for block in blocks])
    sums = np.array([block.sum() for block in blocks])
    mean = float(sums.sum() / sizes.sum())
    if len(blocks) < 2:
        return Estimate(mean, math.nan, math.nan)
    spread = float(np.square(sums - sizes * mean).sum()) * len(blocks) / (len(blocks) - 1)
    half = CONFIDENCE * math.sqrt(spread) / float(sizes.sum())
    return Estimate(mean, mean - half, mean + half)


def perplexity_table() -> Table:
    columns = (
        Column("text", "text"),
        Column("variant", "KV"),
        Column("kv_bytes", "bytes/token"),
        Column("tokens", "tokens"),
        Column("sparsified", "sparsified"),
        Column("nll", "nats", 1, 4),
        Column("nll_difference", "diff", 1, 5),
        Column("perplexity", "perplexity", 1, 4),
        Column("increase", "increase %", 0.01, 3),
        Column("increase_low", "from", 0.01, 3),
        Column("increase_high", "to", 0.01, 3),
    )
    return Table("perplexity", "perplexity; increase over the reference with its 95% interval", columns)


def agreement_table() -> Table:
    columns = (
        Column("text", "text"),
        Column("variant", "KV"),
        Column("kv_bytes", "bytes/token"),
        Column("tokens", "tokens"),
        Column("sparsified", "sparsified"),
        Column("kl", "KL nats", 1, 6),
        Column("kl_low", "from", 1, 6),
        Column("kl_high", "to", 1, 6),
        Column("kl_p99", "KL p99", 1, 5),
        Column("agreement", "agree %", 0.01, 2),
        Column("agreement_difference", "diff", 0.01, 2),
    )
    return Table("agreement", "next-token distributions beside the reference's", columns)


def perplexity_rows(tracks: Sequence[Track]) -> list[Row]:
    """tracks: the reference's and the variants' of each text, the reference first."""
    return [_perplexity_row(track, blocks) for track, blocks in _with_totals(tracks)]


def agreement_rows(tracks: Sequence[Track]) -> list[Row]:
    return [_agreement_row(track, blocks) for track, blocks in _with_totals(tracks)]


def perplexity_pictures(table: Table) -> list[Picture]:
    return [_bars("increase of perplexity", "percent", table, "increase", 100.0)]


def agreement_pictures(tracks: Sequence[Track], table: Table) -> list[Picture]:
    """KL by text and variant, and by the position at which a token stands."""
    lines = [_by_position(name, blocks) for name, blocks in _by_variant(tracks).items()]
    shown = [line for line in lines if any(line.ys)]
    return [_bars("KL from the reference", "nats", table, "kl", 1.0), Chart("KL by position", "position", "nats", shown)]


def _perplexity_row(track: Track, blocks: Sequence[Block]) -> Row:
    nll = estimate([block.nll for block in blocks]).mean
    more = estimate([block.nll - block.base for block in blocks])
    row = _head(track, blocks) | {"nll": nll, "perplexity": math.exp(nll)}
    keys = ("nll_difference", "increase", "increase_low", "increase_high")
    found: list[float | None] = [more.mean, *map(math.expm1, more)]
    return row | dict(zip(keys, _unless_reference(track, found), strict=True))


def _agreement_row(track: Track, blocks: Sequence[Block]) -> Row:
    kl = estimate([block.kl for block in blocks])
    p99 = float(np.quantile(np.concatenate([block.kl for block in blocks]), 0.99))
    same = estimate([block.same.astype(np.float64) for block in blocks]).mean
    keys = ("kl", "kl_low", "kl_high", "kl_p99", "agreement", "agreement_difference")
    return _head(track, blocks) | dict(zip(keys, _unless_reference(track, [*kl, p99, same, same - 1]), strict=True))


def _head(track: Track, blocks: Sequence[Block]) -> Row:
    tokens = sum(len(block.nll) for block in blocks)
    head: Row = {"text": track.text, "variant": track.variant, "kv_bytes": track.kv_bytes}
    return head | {"tokens": tokens, "sparsified": track.sparsified}


def _unless_reference(track: Track, values: Sequence[float | None]) -> list[Value]:
    """Of the reference a difference says nothing; an interval of a single block does not exist."""
    reference = track.variant == REFERENCE.name
    return [None if reference or value is None or math.isnan(value) else value for value in values]


def _with_totals(tracks: Sequence[Track]) -> list[tuple[Track, list[Block]]]:
    """Every track that has been begun, and over several texts each variant's total."""
    begun = [track for track in tracks if track.blocks]
    rows = [(track, track.blocks) for track in begun]
    if len({track.text for track in begun}) < 2:
        return rows
    totals: dict[str, Track] = {}
    for track in begun:
        totals.setdefault(track.variant, Track(ALL, track.variant, track.kv_bytes)).sparsified += track.sparsified
    return rows + [(totals[name], blocks) for name, blocks in _by_variant(begun).items()]


def _by_variant(tracks: Sequence[Track]) -> dict[str, list[Block]]:
    groups: dict[str, list[Block]] = {}
    for track in tracks:
        groups.setdefault(track.variant, []).extend(track.blocks)
    return groups


def _by_position(name: str, blocks: Sequence[Block]) -> Line:
    """Means over the blocks that begin at the same position."""
    groups: dict[int, list[F64]] = {}
    for block in blocks:
        groups.setdefault(int(block.position[0]), []).append(block.kl)
    xs = sorted(groups)
    return Line(name, xs, [float(np.concatenate(groups[x]).mean()) for x in xs])


def _bars(title: str, label: str, table: Table, key: str, scale: float) -> Bars:
    rows = [row for row in table.rows if row[key] is not None]
    variants, texts = (list(dict.fromkeys(str(row[name]) for row in rows)) for name in ("variant", "text"))
    found = {(row["variant"], row["text"]): scale * float(row[key] or 0) for row in rows}
    return Bars(title, label, variants, {text: [found.get((variant, text)) for variant in variants] for text in texts})
