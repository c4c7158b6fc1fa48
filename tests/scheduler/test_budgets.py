"""Sequences with a KV budget: where their work is cut, what they reuse, how they end."""

import numpy as np
import pytest

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.errors import KVBudgetTooSmall
from tokenmill.core.types import FRAME, SamplingParams, Strategy, Streaming
from tokenmill.kv.budget import WEIGHED, SparsePolicy
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window
from tokenmill.kv.manager import KVManager
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler, Step
from tokenmill.scheduler.sequence import Sequence

POSITIONS, HEADS = SparsePolicy("topk_positions"), SparsePolicy("topk_heads")


def scheduler(policy: SparsePolicy, *rules: Retention, n_frames: int = 400, chunk: int = 100, chunked: bool = True) -> Scheduler:
    groups = [KVGroup(f"group {number}", rule, ((number, 0),)) for number, rule in enumerate(rules)]
    return Scheduler(KVManager(groups, n_frames, BlockManagerConfig(), policy), Limits(8, chunk, chunked))


def sequence(
    name: str, prompt: int, budget: int | None, max_tokens: int = 400, token: int = 1, arrival: float = 0.0, megabytes: float | None = None
) -> Sequence:
    """budget: frames; megabytes: the same, as it was asked for."""
    params = SamplingParams(max_tokens=max_tokens, kv_budget_mb=megabytes)
    return Sequence(name, 0, [token] * prompt, params, 7, arrival=arrival, kv_budget=budget)


def advance(s: Scheduler) -> Step:
    step = s.schedule(0.0)
    assert step is not None
    weights = {work.sequence: np.ones(-(-(work.start + work.n_tokens) // FRAME), np.int64) for work in step if work.weighs}
    s.commit(step, {work.sequence: [5] for work in step if work.samples}, weights)
    s.check_integrity()
    return step


def spans(s: Scheduler, steps: int) -> list[tuple[int, int, bool, bool]]:
    found = []
    for _ in range(steps):
        (work,) = advance(s)
        found.append((work.start, work.start + work.n_tokens, work.sparse, work.weighs))
    return found


def test_work_is_cut_at_points_and_where_weighing_for_them_begins() -> None:
    s = scheduler(POSITIONS, Whole())
    one = sequence("a", 300, budget=30)
    s.add(one)
    assert [one.ladder.rung(n).point for n in range(2)] == [216, 280]  # type: ignore[union-attr]
    assert spans(s, 5) == [
        (0, 100, False, False),
        (100, 152, False, False),
        (152, 216, False, True),
        (216, 280, True, True),
        (280, 300, True, False),
    ]
    assert (one.sparsified_from, one.climbed, s.n_sparsified, s.n_tainted) == (216, 2, 2, 1)
    assert one.dropped_tokens == [s.kv.use().dropped * FRAME]
    assert one.dropped_tokens[0] > 0


def test_an_uncut_prompt_is_cut_at_points_alone() -> None:
    s = scheduler(HEADS, Whole(), Streaming(16, 32), chunked=False)
    s.add(sequence("a", 200, budget=30))
    assert [span[:2] for span in spans(s, 3)] == [(0, 104), (104, 168), (168, 200)]


def test_heads_drop_their_middle_and_slide_from_then_on() -> None:
    s = scheduler(HEADS, Whole(), Streaming(16, 32))
    one = sequence("a", 103, budget=30)
    s.add(one)
    spans(s, 3)
    whole, streaming = s.kv.tables(one.id)
    assert (one.computed, whole.present, streaming.held(0, 13)) == (104, 13, [(0, 2), (9, 13)])
    spans(s, 16)
    assert streaming.held(0, 15) == [(0, 2), (11, 15)]
    assert one.dropped_tokens == [9 * FRAME]


def test_without_a_strategy_a_sequence_ends_at_its_budget() -> None:
    s = scheduler(SparsePolicy(), Whole(), Whole())
    one = sequence("a", 30, budget=10)
    s.add(one)
    while not one.over_budget:
        advance(s)
    assert (one.computed, one.target) == (40, 41)
    assert sum(table.present for table in s.kv.tables(one.id)) == 10
    s.finish(one)
    s.add(sequence("b", 40, budget=10))
    advance(s)


def test_a_prompt_beyond_its_budget_is_refused_with_numbers() -> None:
    s = scheduler(SparsePolicy(), Whole(), Whole())
    with pytest.raises(KVBudgetTooSmall, match=r"prompt has 41 tokens, .* take 12 KV frames, but .* is 10: .*_gb 1\.20-fold"):
        s.add(sequence("a", 41, budget=10))
    assert not s.has_work
    assert s.n_refused == 1


@pytest.mark.parametrize("strategy", ["none", "topk_positions"])
@pytest.mark.parametrize("length", [41, 400, 3000])
def test_the_budget_that_a_refused_request_is_told_of_is_enough_and_not_much_more(strategy: Strategy, length: int) -> None:
    frame_mb = 0.17
    s = scheduler(SparsePolicy(strategy), Whole(), Whole(), n_frames=2000)
    with pytest.raises(KVBudgetTooSmall, match=r"budget of 1\.9 MB is 11: .* raise kv_budget_mb to ([\d.]+)$") as refused:
        s.add(sequence("a", length, budget=int(1.9 / frame_mb), megabytes=1.9))
    told = float(refused.value.message.rpartition(" ")[2])
    s.add(sequence("b", length, budget=int(told / frame_mb)))
    with pytest.raises(KVBudgetTooSmall):
        s.add(sequence("c", length, budget=int(told / frame_mb * 0.9)))


def test_a_hit_ends_before_the_rows_that_are_weighed() -> None:
    s = scheduler(POSITIONS, Whole(), chunk=1000)
    s.add(sequence("a", 500, budget=None, max_tokens=1))
    advance(s)
    s.add(sequence("b", 500, budget=60, arrival=1.0))
    assert spans_of(s, "b") == (432 - WEIGHED, 432)
    s = scheduler(HEADS, Whole(), Streaming(16, 32), chunk=1000)
    s.add(sequence("a", 400, budget=None, max_tokens=1))
    advance(s)
    s.add(sequence("b", 200, budget=30, arrival=1.0))
    assert spans_of(s, "b") == (104 - FRAME, 104)


def spans_of(s: Scheduler, name: str) -> tuple[int, int]:
    (work,) = [work for work in advance(s) if work.sequence.request_id == name]
    return work.start, work.start + work.n_tokens


def test_nobody_waits_for_what_a_sparse_sequence_computes() -> None:
    s = scheduler(POSITIONS, Whole())
    one = sequence("a", 530, budget=60)
    s.add(one)
    while one.sparsified_from is None:
        advance(s)
    s.add(sequence("b", 530, budget=None, arrival=1.0))
    assert spans_of(s, "b") == (432, 492), "what the chunk has left"


def test_a_preempted_sequence_takes_full_frames_again_and_drops_at_the_same_point() -> None:
    s = scheduler(POSITIONS, Whole(), n_frames=34)
    one = sequence("a", 210, budget=30, max_tokens=150)
    one.rank = (2, *one.rank[1:])
    s.add(one)
    while one.sparsified_from is None:
        advance(s)
    dropped = s.kv.tables(one.id)[0].held(0, 27)
    s.add(Sequence("vip", 0, [2] * 150, SamplingParams(max_tokens=2), 1, priority=0, arrival=2.0))
    one.priority = 2
    advance(s)
    assert (one.running, one.computed, one.sparsified_from, one.dropped_tokens) == (False, 0, None, [])
    advance(s)
    s.abort("vip")
    while one.sparsified_from is None:
        advance(s)
    assert s.kv.tables(one.id)[0].held(0, 27) == dropped
    assert s.n_tainted == 2


def test_a_sequence_with_a_budget_is_admitted_for_its_peak() -> None:
    s = scheduler(POSITIONS, Whole(), n_frames=130)
    for number in range(4):
        s.add(sequence(f"s{number}", 500, budget=60, token=number, arrival=float(number), max_tokens=40))
    advance(s)
    assert (s.n_running, s.n_waiting) == (1, 3), "the chunk is used up"
    for _ in range(20):
        advance(s)
    assert s.n_running == 2, "two peaks of 54 and the spare frames fit, three do not"
    assert s.n_preemptions == 0


def test_small_ones_go_on_beside_a_prompt_that_fills_the_pool() -> None:
    s = scheduler(SparsePolicy(), Whole(), Window(64), n_frames=150, chunk=40)
    for number in range(3):
        s.add(sequence(f"small {number}", 20, budget=None, token=number, max_tokens=30))
    advance(s)
    s.add(sequence("giant", 800, budget=None, token=9, arrival=1.0, max_tokens=30))
    done = set()
    for _ in range(200):
        if not s.has_work:
            break
        for work in advance(s):
            if work.sequence.running and work.sequence.n_output == 30:
                done.add(work.sequence.request_id)
                s.finish(work.sequence)
    assert len(done) == 4
    assert s.n_preemptions == 0


@pytest.mark.parametrize("policy", [SparsePolicy(), POSITIONS, HEADS])
def test_what_may_be_drafted_is_found_without_trying_every_length(policy: SparsePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget far below what the request may put out: looking for the last token that fits must not cost more than a step."""
    s = scheduler(policy, Whole(), Streaming(16, 32))
    one = sequence("a", 60, budget=30, max_tokens=100_000)
    one.ladder = ladder = s.kv.ladder(30)
    most = next(more for more in range(100_000) if not ladder.fits(60 + more + 1)) if one.rung is None else None
    asked: list[int] = []

    def counting(n_tokens: int) -> bool:
        asked.append(n_tokens)
        return fits(n_tokens)

    fits = ladder.fits
    monkeypatch.setattr(ladder, "fits", counting)
    found = one.draft_room
    assert len(asked) <= 20
    assert most is None or found == most
    assert fits(60 + found)
