from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Heads
from tokenmill.measure.costs import Costs
from tokenmill.measure.report import Ceilings
from tokenmill.models.loader import load

COSTS = Costs(weight_bytes=1000, products=500, wanted_products=200, shape=Heads(4, 2, 16), windows=(None, 8))
CEILINGS = Ceilings(read=100.0, int8=1000.0, bf16=10_000.0)


def test_kv_and_attention_stop_at_a_layers_window() -> None:
    # 4 bytes x 2 heads x 16 elements per position; the second layer keeps 8
    assert COSTS.kv_bytes(5) == 128 * (5 + 5)
    assert COSTS.kv_bytes(20) == 128 * (20 + 8)
    # 4 operations x 4 heads x 16 elements per position seen, its own included
    assert COSTS.attention_operations(0) == 256 * 2
    assert COSTS.attention_operations(9) == 256 * (10 + 8)
    assert COSTS.attention_operations(6, rows=3) == 256 * ((7 + 8 + 9) + (7 + 8 + 8))


def test_a_floor_is_the_longer_of_reading_and_computing() -> None:
    assert CEILINGS.floor(read=500, int8=1000, bf16=10_000) == 5.0
    assert CEILINGS.floor(read=100, int8=1000, bf16=10_000) == 2.0


def test_decode_and_prefill_floors_were_computed_by_hand() -> None:
    reading = (1000 + 2 * 128 * 10) / 100
    assert COSTS.decode_floor(CEILINGS, streams=2, context=5) == pytest.approx(reading)
    computing = 2 * (500 * 30 + 200) / 1000 + COSTS.attention_operations(0, 30) / 10_000
    assert COSTS.prefill_floor(CEILINGS, [30]) == pytest.approx(computing)


def test_the_floor_of_many_answers_adds_up_their_steps() -> None:
    one_by_one = sum(COSTS.decode_floor(CEILINGS, 1, context) for context in (5, 6, 7))
    assert COSTS.answers_floor(CEILINGS, [5], [4]) == pytest.approx(one_by_one)
    assert COSTS.answers_floor(CEILINGS, [5, 9], [1, 1]) == 0.0


def test_a_real_models_costs_are_those_of_its_weights(smollm2_path: Path) -> None:
    costs, model = Costs.of(smollm2_path), load(smollm2_path, Pool(1))
    inner = [weight for name, weight in model.weights.items() if name not in ("embed", "head")]
    after_last_attention = 576 * 576 + 3 * 576 * 1536
    assert costs.products == sum(weight.rows * weight.cols for weight in inner) - after_last_attention
    assert costs.wanted_products == 49152 * 576 + after_last_attention
    assert costs.windows == (None,) * 30
    packed = sum(weight.nbytes for weight in inner) + model.weights["head"].nbytes
    assert costs.weight_bytes <= packed < 1.03 * costs.weight_bytes
