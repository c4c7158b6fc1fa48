from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tokenmill.measure.plot import Bars, draw
from tokenmill.measure.quality.likelihood import (
    Block,
    Track,
    agreement_pictures,
    agreement_rows,
    agreement_table,
    compare,
    estimate,
    log_softmax,
    perplexity_pictures,
    perplexity_rows,
    perplexity_table,
)


def log(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows, np.float32))


def test_a_comparison_is_what_one_computes_by_hand() -> None:
    reference, variant = log([0.5, 0.25, 0.25], [0.1, 0.8, 0.1]), log([0.25, 0.5, 0.25], [0.2, 0.6, 0.2])
    block = compare(reference, variant, [0, 2], first=64)
    assert block.position.tolist() == [64, 65]
    assert block.base == pytest.approx([math.log(2), math.log(10)])
    assert block.nll == pytest.approx([math.log(4), math.log(5)])
    assert block.kl == pytest.approx([0.25 * math.log(2), 0.8 * math.log(8 / 6) - 0.2 * math.log(2)], rel=1e-5)
    assert block.same.tolist() == [False, True]


def test_a_distribution_beside_itself_differs_by_exactly_nothing() -> None:
    rows = log_softmax(np.random.default_rng(0).normal(0, 5, (3, 50_000)).astype(np.float32))
    block = compare(rows, rows, [1, 2, 3], 0)
    assert block.kl.tolist() == [0, 0, 0]
    assert block.same.all()


def test_log_softmax_holds_for_large_logits_and_vocabularies() -> None:
    logits = np.random.default_rng(1).normal(300, 9, (2, 150_000)).astype(np.float32)
    wide = logits.astype(np.float64)
    exact = wide - wide.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert np.abs(log_softmax(logits) - exact).max() < 1e-5


def test_the_interval_of_a_mean_covers_it_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(400):
        common = rng.normal(0, 1, (40, 1))  # what the positions of a block share
        found = estimate(list(3 + common + rng.normal(0, 1, (40, 16))))
        hits += found.low <= 3 <= found.high
    assert 0.90 < hits / 400 < 0.98


def test_blocks_of_different_sizes_count_by_their_positions() -> None:
    assert estimate([np.array([1.0, 1.0, 1.0]), np.array([5.0])]).mean == 2.0
    alone = estimate([np.array([1.0, 3.0])])
    assert alone.mean == 2.0
    assert math.isnan(alone.low)


def block(base: float, more: float, kl: float, same: bool, first: int = 0) -> Block:
    n = 4
    return Block(np.arange(first, first + n), np.full(n, base), np.full(n, base + more), np.full(n, kl), np.full(n, same))


@pytest.fixture
def tracks() -> list[Track]:
    return [
        Track("english", "bf16", 100, [block(2.0, 0, 0, True), block(2.0, 0, 0, True, 4)]),
        Track("english", "int8/int8", 52, [block(2.0, 0.1, 0.25, True), block(2.0, 0.1, 0.5, False, 4)]),
        Track("python", "bf16", 100, [block(1.0, 0, 0, True)]),
        Track("python", "int8/int8", 52, [block(1.0, -0.1, 0.75, True)]),
        Track("python", "not begun", 52),
    ]


def test_perplexity_has_the_reference_first_and_differences_beside_it(tracks: list[Track]) -> None:
    rows = {(row["text"], row["variant"]): row for row in perplexity_rows(tracks)}
    assert list(rows)[:2] == [("english", "bf16"), ("english", "int8/int8")]
    assert len(rows) == 6
    first, second = rows["english", "bf16"], rows["english", "int8/int8"]
    assert (first["tokens"], first["increase"], first["nll_difference"]) == (8, None, None)
    assert first["perplexity"] == pytest.approx(math.exp(2))
    assert second["perplexity"] == pytest.approx(math.exp(2.1))
    assert second["increase"] == second["increase_low"] == pytest.approx(math.exp(0.1) - 1)
    assert rows["python", "int8/int8"]["increase_low"] is None, "one block has no interval"
    total = rows["all", "int8/int8"]
    assert (total["tokens"], total["kv_bytes"]) == (12, 52)
    assert total["nll_difference"] == pytest.approx(0.1 / 3)
    assert float(total["increase_low"] or 0) < float(total["increase"] or 0) < float(total["increase_high"] or 0)


def test_agreement_counts_what_differs(tracks: list[Track]) -> None:
    rows = {(row["text"], row["variant"]): row for row in agreement_rows(tracks)}
    assert rows["english", "bf16"]["kl"] is None
    assert (rows["english", "int8/int8"]["kl"], rows["english", "int8/int8"]["agreement"]) == (0.375, 0.5)
    assert rows["english", "int8/int8"]["agreement_difference"] == -0.5
    assert rows["all", "int8/int8"]["kl"] == 0.5
    assert rows["all", "int8/int8"]["agreement"] == pytest.approx(2 / 3)


def test_both_are_drawn(tracks: list[Track], tmp_path: Path) -> None:
    table = agreement_table()
    table.rows = agreement_rows(tracks)
    bars, lines = agreement_pictures(tracks, table)
    assert isinstance(bars, Bars)
    assert bars.values == {"english": [0.375], "python": [0.75], "all": [0.5]}
    assert [(line.label, list(line.xs), list(line.ys)) for line in lines.lines] == [("int8/int8", [0, 4], [0.5, 0.5])]
    other = perplexity_table()
    other.rows = perplexity_rows(tracks)
    draw([bars, lines, *perplexity_pictures(other)], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_interrupted_before_anything_was_read_is_an_empty_table() -> None:
    assert perplexity_rows([Track("english", "bf16", 100)]) == agreement_rows([]) == []
