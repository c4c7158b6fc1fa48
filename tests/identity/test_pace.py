"""Promise 1 under steps of bounded length: how prompts are cut depends on the clock, and answers do not."""

from __future__ import annotations

import random

import pytest
from comparison import Setting
from request_pool import RequestPool

from tokenmill.scheduler.pace import Pace

SETTINGS = {
    "defaults": Setting(scheduler="decode_optimized"),
    "small chunks and pages": Setting(scheduler="decode_optimized", max_batch_size=6, chunk_size=48, block_size=8, threads=1),
    "drafts in a small cache": Setting(scheduler="decode_optimized", frames=40, drafts="suffix"),
}


class Rows:
    """Of a bound that changes with every step."""

    def __init__(self) -> None:
        self._random = random.Random(5)
        self.asked = 0

    def __get__(self, pace: Pace, kind: type) -> int:
        self.asked += 1
        return self._random.choice((1, 9, 20, 33, 70, 200))


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_do_not_depend_on_how_long_steps_may_be(pool: RequestPool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    monkeypatch.setattr(Pace, "rows", rows)
    pool.trial(SETTINGS[name], [*pool.short, *pool.long], mixes=2, arrivals=12)
    assert rows.asked > 20
