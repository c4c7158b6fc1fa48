"""A step between its start and its finish."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tokenmill.kernels.native import PackedWeight, Pool
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.sampling.sampler import Question, Sampler

ROWS = 20
PATIENCE = 60.0
"""Seconds after which a test that waits for threads fails; it normally waits for microseconds."""


class Flight:
    """A tape, a step for it, and what the step gives."""

    def __init__(self, tiny_model, threads):
        model = tiny_model(40)
        self.pool = Pool(threads)
        weights = {name: PackedWeight.pack(*file, self.pool) for name, file in model.files.items()}
        self.tape = Tape(model.program, weights, model.vectors, self.pool, ROWS, ROWS, 3)
        table = np.zeros(1, np.int32)
        self.step = Batch(model.tokens(ROWS), [Segment(0, ROWS, 0, (Pages(table, table),))], np.arange(ROWS, dtype=np.int32))
        self.view = self.tape.run(self.step)
        self.want = self.view.copy()


@pytest.fixture(params=[1, 2, 3])
def flight(tiny_model, request):
    return Flight(tiny_model, request.param)


def test_the_other_threads_compute_a_step_before_it_is_finished(tiny_model):
    flight = Flight(tiny_model, 2)
    flight.view[:] = np.nan
    flight.tape.start(flight.step)
    deadline = time.monotonic() + PATIENCE
    while np.isnan(flight.view).any():
        assert time.monotonic() < deadline, "nobody computed the step"
        time.sleep(0)
    np.testing.assert_array_equal(flight.tape.finish(), flight.want)


def test_without_other_threads_a_start_only_prepares(tiny_model):
    flight = Flight(tiny_model, 1)
    flight.view[:] = np.nan
    flight.tape.start(flight.step)
    assert np.isnan(flight.view).all()
    np.testing.assert_array_equal(flight.tape.finish(), flight.want)


def test_the_arrays_of_a_step_are_free_once_it_has_started(flight):
    flight.tape.start(flight.step)
    for array in (flight.step.tokens, flight.step.outputs, flight.step.segments[0].pages[0].frames):
        array[:] = -1
    np.testing.assert_array_equal(flight.tape.finish(), flight.want)


def test_nothing_else_can_use_the_pool_in_between(flight):
    logits = flight.want.copy()
    flight.tape.start(flight.step)
    for misuse in (
        lambda: flight.tape.start(flight.step),
        lambda: flight.tape.rerun(np.zeros(1, np.int32)),
        lambda: Sampler(flight.pool).likelihoods(logits, [Question(0, 0, 1)]),
    ):
        with pytest.raises(RuntimeError, match="a job is under way"):
            misuse()
    np.testing.assert_array_equal(flight.tape.finish(), flight.want)
    np.testing.assert_array_equal(flight.tape.rerun(np.array([7], np.int32)), flight.want[7:8])


def test_what_was_not_started_cannot_be_finished(flight):
    with pytest.raises(RuntimeError, match="no step was started"):
        flight.tape.finish()
    np.testing.assert_array_equal(flight.tape.run(flight.step), flight.want)
    with pytest.raises(RuntimeError, match="no step was started"):
        flight.tape.finish()


def test_a_step_that_is_refused_is_not_in_flight(flight):
    with pytest.raises(ValueError, match=r"\[tape\]"):
        flight.tape.start(Batch(flight.step.tokens + np.int32(80), flight.step.segments, flight.step.outputs))
    with pytest.raises(RuntimeError, match="no step was started"):
        flight.tape.finish()
    np.testing.assert_array_equal(flight.tape.run(flight.step), flight.want)


def test_a_tape_can_go_with_a_step_in_flight_and_leaves_its_pool_usable(flight):
    flight.tape.start(flight.step)
    del flight.view, flight.tape
    answers = Sampler(flight.pool).likelihoods(flight.want, [Question(row, 0, 1) for row in range(ROWS)])
    assert len(answers) == ROWS
