"""Drafts get the rows and frames that are left, and nobody gives anything up for one."""

from __future__ import annotations

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import SamplingParams
from tokenmill.kv.groups import KVGroup, Whole
from tokenmill.kv.manager import KVManager
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence

GROUP = KVGroup("all", Whole(), ((0, 0),))


def scheduler(n_frames: int, chunk: int = 64, places: int = 4) -> Scheduler:
    return Scheduler(KVManager([GROUP], n_frames, BlockManagerConfig(block_size=8)), Limits(places, chunk))


def add(s: Scheduler, name: str, prompt: int, max_tokens: int = 40) -> Sequence:
    one = Sequence(name, 0, [ord(name)] * prompt, SamplingParams(max_tokens=max_tokens, seed=0), 0, arrival=float(ord(name)))
    s.add(one)
    return one


def run(s: Scheduler, answers: dict[Sequence, list[int]] | None = None) -> list[tuple[str, int]]:
    """One step; returns who had how many drafted tokens verified."""
    step = s.schedule(0.0)
    assert step is not None
    s.commit(step, {work.sequence: (answers or {}).get(work.sequence, [5]) for work in step if work.samples})
    s.check_integrity()
    return [(work.sequence.request_id, len(work.draft)) for work in step]


def test_what_was_right_is_computed_and_what_was_wrong_leaves_nothing() -> None:
    s = scheduler(16)
    a = add(s, "a", 12)
    run(s)
    held = s.kv.n_held
    assert s.lend(a, 9) == 9
    assert s.kv.n_held == held + 1
    a.draft = (5, 5, 6, 7, 8, 9, 1, 2, 3)
    assert run(s, {a: [5, 5, 7]}) == [("a", 9)]
    assert (a.computed, a.token_ids[12:], a.draft) == (15, [5, 5, 5, 7], ())
    assert s.kv.n_held == held
    assert s.lend(a, 9) == 9
    a.draft = (1,) * 9
    run(s, {a: [1] * 10})
    assert a.computed == 25
    assert s.kv.n_held == 4


def test_no_more_is_lent_than_may_be_put_out() -> None:
    s = scheduler(16)
    a = add(s, "a", 4, max_tokens=6)
    run(s)
    assert s.lend(a, 9) == 4


def test_frames_that_others_need_are_not_lent() -> None:
    s = scheduler(6)
    a, _ = add(s, "a", 9, 30), add(s, "b", 9, 30)
    run(s)
    assert s.kv.available == 2
    assert s.lend(a, 12) == 6, "the frame that it has is its own to draft in"
    s = scheduler(9)
    a = add(s, "a", 9)
    run(s)
    assert s.lend(a, 12) == 12
    run(s)
    add(s, "c", 40, 20)
    assert s.lend(a, 12) == 5, "somebody waits for what is free"


def test_nobody_is_preempted_for_a_draft() -> None:
    s = scheduler(8)
    a, b = add(s, "a", 9), add(s, "b", 9)
    run(s)
    assert s.lend(a, 16) == 16
    a.draft = (1,) * 16
    b.token_ids += [5] * 23
    b.computed += 23  # which now lacks more than there is
    assert s.kv.missing(b.id, b.target, b.target) > s.kv.available
    assert run(s) == [("a", 0), ("b", 0)]
    assert s.n_preemptions == 0


def test_what_is_lent_to_a_sequence_that_ends_is_forgotten_with_it() -> None:
    s = scheduler(16)
    a = add(s, "a", 9)
    run(s)
    assert s.lend(a, 12) == 12
    s.abort("a")
    assert (s.kv.n_held, s._lent) == (0, {})


def test_prompts_come_before_drafts() -> None:
    s = scheduler(64, chunk=16)
    a = add(s, "a", 4)
    run(s)
    b = add(s, "b", 28)
    assert s.lend(a, 10) == 10
    a.draft = (1,) * 10
    assert run(s) == [("a", 0), ("b", 0)]
    assert b.computed == 16
    s.lend(a, 10)
    a.draft = (1,) * 10
    assert run(s) == [("a", 4), ("b", 0)]
