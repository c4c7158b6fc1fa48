"""Steps of bounded length, in an engine whose clock says what steps take."""

from __future__ import annotations

import numpy as np
import pytest

LONG = np.random.default_rng(8).integers(0, 499, 6000).tolist()


class Steps:
    """Stands between an engine and its runner, and moves the engine's clock by so many seconds per row."""

    def __init__(self, engine, row):
        self.runner, engine._runner, engine._clock = engine._runner, self, self
        self.row = row
        self.time = 0.0
        self.seconds = []

    def now(self):
        return self.time

    def start(self, step):
        self.seconds.append(self.row * sum(work.n_tokens + len(work.draft) for work in step))
        self.time += self.seconds[-1]
        return self.runner.start(step)

    def finish(self, *given):
        return self.runner.finish(*given)

    def give_way(self):
        self.runner.give_way()


def served(build, **settings):
    """How long steps were in which a long prompt met a stream, which has the tokens that it has alone."""
    talk = build(frames=900, max_model_len=7000, **settings)
    alone = talk.ask(LONG[:5], max_tokens=60).tokens
    steps = Steps(talk.engine, row=0.0002)
    talk.add("stream", LONG[:5], max_tokens=60)
    while not talk.answers:
        talk.step()
    steps.seconds.clear()
    talk.add("prompt", LONG, max_tokens=1)
    while ("prompt", 0) not in talk.answers and ("stream", 0) in talk.answers and not talk.answers["stream", 0].finish_reason:
        talk.step()
    found = steps.seconds.copy()
    assert talk.finish()["stream", 0].tokens == alone
    return found


def test_steps_beside_a_stream_come_to_take_what_they_may(build):
    took = served(build, scheduler="decode_optimized", max_step_ms=40)
    assert took[-10:-5] == pytest.approx([0.04] * 5, rel=0.1), "before the end of the prompt"
    assert max(took) < 0.08


def test_other_schedulers_fill_chunks(build):
    assert 512 * 0.0002 < max(served(build)) < 520 * 0.0002
    assert 2048 * 0.0002 < max(served(build, scheduler="prefill_optimized")) < 2060 * 0.0002
