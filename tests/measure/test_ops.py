from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.kernels.native import PackedWeight, Pool
from tokenmill.kernels.ops import Result
from tokenmill.measure import kernels
from tokenmill.measure.kernels import OpTimer, chart, linear_table
from tokenmill.measure.op_programs import LinearKind, Part, ops_of, reference_ops
from tokenmill.measure.random_weights import FORMS, QUANTISED, check_form, fits, random_bytes
from tokenmill.measure.report import Ceilings
from tokenmill.models.source import Source

CEILINGS = Ceilings(read=1e12, int8=1e15, bf16=1e15)
"""Far above any machine's, so that every ratio is below 1."""


@pytest.fixture(scope="module")
def timer() -> OpTimer:
    return OpTimer(Pool(1), CEILINGS, seed=0)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches so small that few weights overflow them."""
    monkeypatch.setattr(kernels, "largest_cache", lambda: 1 << 18)
    monkeypatch.setattr(kernels, "WORK", 1e7)
    monkeypatch.setattr(kernels, "CONTEXTS", (16, 64))
    monkeypatch.setattr(kernels, "CHUNK", 16)


@pytest.mark.parametrize("form", FORMS)
def test_random_weights_of_every_form_are_finite_and_differ(form: str) -> None:
    data = random_bytes(form, 32, 256, np.random.default_rng(0))
    numbers = PackedWeight.pack(form, 32, 256, data, Pool(1)).dequantize()
    assert np.isfinite(numbers).all()
    assert 1e-3 < np.std(numbers) < 1e3


def test_an_unknown_form_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="no weight form 'Q9'; there are F32, F16"):
        check_form("Q9", "--forms")


def test_the_ops_of_a_real_model_are_those_of_its_file(smollm2_path: Path) -> None:
    ops = ops_of(Source.open(smollm2_path))
    found = {(kind.name, kind.outputs, kind.cols, kind.result): count for kind, count in ops.linear.items()}
    assert found == {
        ("q k v", 960, 576, "store"): 30,
        ("o", 576, 576, "add"): 30,
        ("gate up", 3072, 576, "silu"): 30,
        ("down", 576, 1536, "add"): 30,
        ("head", 49152, 576, "store"): 1,
    }
    reference = {(k.name, k.outputs, k.cols, k.result): count for k, count in reference_ops("Q4_1").linear.items()}
    assert reference == found


@pytest.mark.parametrize("form", ["Q4_1", "Q6_K", "BF16"])
@pytest.mark.parametrize(("normed", "result"), [(True, "store"), (False, "add"), (True, "silu"), (False, "gelu_tanh")])
def test_a_linear_op_has_a_time_and_a_ratio(timer: OpTimer, form: str, normed: bool, result: Result) -> None:
    kind = LinearKind("op", (Part(form, 48, 256), Part("Q8_0", 48, 256)), normed, result, False)
    rows = list(timer.linear(kind, 30, [1, 5]))
    assert [row["rows"] for row in rows] == [1, 5]
    for row, m in zip(rows, (1, 5), strict=True):
        assert (row["op"], row["outputs"], row["cols"], row["per_pass"]) == ("op", 96, 256, 30)
        assert isinstance(row["seconds"], float)
        assert row["operations_per_second"] == pytest.approx(2 * m * 96 * 256 / row["seconds"])
        assert 0 < float(row["ratio"] or 0) < 1
    assert len(list(timer.input(kind, [1, 5]))) == 2


def test_an_output_head_is_measured_for_as_many_rows_as_an_engine_asks_for(timer: OpTimer) -> None:
    kind = LinearKind("head", (Part("Q8_0", 256, 64),), True, "store", True)
    assert [row["rows"] for row in timer.linear(kind, 1, [1, 64, 65, 512])] == [1, 64]


def test_attention_is_measured_in_decode_and_prefill(timer: OpTimer) -> None:
    rows = list(timer.attention(reference_ops("Q8_0")))
    assert [(row["phase"], row["streams"], row["rows"], row["context"]) for row in rows] == [
        ("decode", 1, 1, 16),
        ("decode", 16, 16, 16),
        ("decode", 1, 1, 64),
        ("decode", 16, 16, 64),
        ("prefill", 1, 16, 0),
        ("prefill", 1, 16, 64),
    ]
    assert all(0 < float(row["ratio"] or 0) < 1 for row in rows)


def test_a_form_fits_whole_blocks_only() -> None:
    assert [form for form in QUANTISED if fits(form, 576)] == ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def test_the_chart_has_a_line_for_each_op_and_the_ceiling(timer: OpTimer) -> None:
    table = linear_table()
    kind = LinearKind("o", (Part("Q8_0", 64, 64),), False, "store", False)
    table.rows.extend(timer.linear(kind, 1, [1, 4]))
    drawn = chart(table, CEILINGS)
    assert [(line.label, line.xs) for line in drawn.lines] == [("o Q8_0 64x64", [1.0, 4.0]), ("int8 ceiling", [1.0, 4.0])]
    assert chart(linear_table(), None).lines == []
