"""Turns of `tokenmill bench pd` over worker processes without a model."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import pytest
import scripted_engine

from tokenmill.cluster.division import WorkerPlan
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.supervisor import RestartPolicy
from tokenmill.core.errors import KVBudgetTooSmall, TokenmillError
from tokenmill.core.roles import Role
from tokenmill.measure.separation import turns
from tokenmill.measure.separation.demand import Demand
from tokenmill.measure.separation.setups import Setup
from tokenmill.measure.separation.turns import check_answers, take_turn

DEMAND = Demand(3, stream_tokens=10, prompts=4, prompt_tokens=50, answer_tokens=6, rate=40.0, vocabulary=256, seed=3)
QUICK = RestartPolicy(first_delay=0.01, longest_delay=0.02, load_attempts=3)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "Cluster", functools.partial(Cluster, command=scripted_engine.command(), policy=QUICK))


def setup(**script: object) -> Setup:
    config = scripted_engine.config(step_seconds=0.002, **script)
    return Setup("mixed 64", config, [WorkerPlan("mixed-0", Role.MIXED, config)])


async def test_a_turn_has_all_that_was_asked() -> None:
    before = asyncio.all_tasks()
    turn, info = await take_turn(setup(), DEMAND)
    assert asyncio.all_tasks() == before
    assert (info.kernels, turn.transfers) == ("none", None)
    long = [asked for asked in turn.asked if asked.long]
    assert [asked.record.scheduled - turn.start for asked in long] == pytest.approx(DEMAND.arrivals())
    for asked in long:  # the engine says prompts again
        assert asked.tokens == asked.generate.prompt[:6]
        assert turn.start <= asked.record.scheduled <= asked.record.times[0] <= turn.until
        assert asked.record.completed
    assert turn.seconds >= DEMAND.seconds
    streams = [asked for asked in turn.asked if not asked.long]
    assert {asked.generate.request_id.split(".")[0] for asked in streams} == {"stream 0", "stream 1", "stream 2"}
    assert len(streams) > 3  # they begin anew
    assert all(asked.tokens == asked.generate.prompt[: len(asked.tokens)] for asked in streams)
    begun = [asked for asked in streams if asked.generate.request_id.endswith(".0")]
    assert all(asked.record.times[1] <= turn.start for asked in begun)  # all decode when it begins
    assert turn.stream_gaps
    assert turn.worker_seconds >= 0 <= turn.gateway_seconds
    again, _ = await take_turn(setup(), DEMAND)
    check_answers([("one", turn), ("two", again)])


async def test_a_worker_that_dies_meanwhile_spoils_a_turn(tmp_path: Path) -> None:
    with pytest.raises(TokenmillError, match="mixed 64: a worker ended while it was measured"):
        await take_turn(setup(exit_at=30, once=str(tmp_path / "once")), DEMAND)


async def test_a_refused_request_is_the_turns_error() -> None:
    with pytest.raises(KVBudgetTooSmall, match="no room"):
        await take_turn(setup(refuse="no room"), DEMAND)


async def test_a_stream_that_fails_ends_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = turns._follow

    async def fail(cluster: Cluster, asked: turns.Asked, decoding: asyncio.Event | None = None) -> None:
        if asked.generate.request_id == "stream 1.1":
            raise KVBudgetTooSmall("no room for more")
        await follow(cluster, asked, decoding)

    monkeypatch.setattr(turns, "_follow", fail)
    before = asyncio.all_tasks()
    with pytest.raises(KVBudgetTooSmall, match="no room for more"):
        await take_turn(setup(), Demand(3, 10, 1, 50, 6, rate=0.001, vocabulary=256, seed=3))  # which would take long
    assert asyncio.all_tasks() == before


async def test_a_cancelled_turn_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    measure = turns._measure

    async def told(*args: object) -> turns.Turn:
        begun.set()
        return await measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(turns, "_measure", told)
    before = asyncio.all_tasks()
    task = asyncio.create_task(take_turn(setup(), Demand(3, 10, 1, 50, 6, rate=0.001, vocabulary=256, seed=3)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
