"""Which budgets hold a text, and which ones make it give something up: beside ladders of every budget."""

from __future__ import annotations

import pytest

from tokenmill.core.types import Pair, Strategy, Streaming
from tokenmill.kernels.layout import KVFormat, KVLayout
from tokenmill.kv.budget import Ladder, SparsePolicy
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window
from tokenmill.measure.kv_model import KVModel
from tokenmill.measure.quality.budgets import Budgets


def budgets(strategy: Strategy, trigger: float, *rules: Retention) -> Budgets:
    pairs: list[tuple[Pair, ...]] = [((number, 0),) for number in range(len(rules))]
    groups = tuple(KVGroup(str(number), rule, of) for number, (rule, of) in enumerate(zip(rules, pairs, strict=True)))
    layout = KVLayout(KVFormat(), tuple(pairs), (None,) * len(rules))
    return Budgets(KVModel(groups, layout, 64, len(rules), 4096, SparsePolicy(strategy, trigger)))


CASES = [
    budgets("topk_positions", 0.9, Whole()),
    budgets("topk_positions", 0.4, Whole(), Whole(), Window(128)),
    budgets("topk_heads", 0.9, Whole(), Streaming(16, 64)),
    budgets("topk_heads", 0.2, Whole(), Streaming(16, 64), Streaming(16, 64)),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [50, 200, 1000])
def test_the_bounds_are_those_of_all_budgets(case: Budgets, length: int) -> None:
    megabyte = case.model.frame_bytes / 2**20
    ladders = {frames: Ladder(frames, case.model.policy, case.model.footprint) for frames in range(1, 3000)}
    holding = {frames for frames, ladder in ladders.items() if ladder.fits(length)}
    giving = {frames for frames, ladder in ladders.items() if (rung := ladder.rung(0)) is not None and rung.point <= length}
    assert case.least(length) == pytest.approx(min(holding) * megabyte)
    assert case.most(length) == (pytest.approx(max(giving) * megabyte) if giving else None)
    for frames in (1, 7, 40, 90, 260, 2000):
        assert case.fits(frames * megabyte, length) is (frames in holding)
        assert case.sparsifies(frames * megabyte, length) is (frames in giving)
