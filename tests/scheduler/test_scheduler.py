"""The scheduler on a real KV manager, with tokens made up by the test."""

import pytest

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.errors import KVBudgetTooSmall
from tokenmill.core.types import SamplingParams
from tokenmill.kv.groups import KVGroup, Whole
from tokenmill.kv.manager import KVManager
from tokenmill.scheduler.plan import Limits
from tokenmill.scheduler.scheduler import Scheduler, Step
from tokenmill.scheduler.sequence import Sequence


def scheduler(n_frames: int = 64, max_batch_size: int = 8, chunk_size: int = 64, chunked: bool = True) -> Scheduler:
    kv = KVManager([KVGroup("whole", Whole(), ((0, 0),))], n_frames, BlockManagerConfig())
    return Scheduler(kv, Limits(max_batch_size, chunk_size, chunked))


def sequence(name: str, prompt: list[int], max_tokens: int = 4, choice: int = 0, arrival: float = 0.0, priority: int = 1) -> Sequence:
    return Sequence(name, choice, list(prompt), SamplingParams(max_tokens=max_tokens), 7, priority, arrival)


def advance(s: Scheduler, now: float = 0.0) -> Step:
    """One step; every sampled token is 1000 + its position."""
    step = s.schedule(now)
    assert step is not None
    s.commit(step, {work.sequence: [1000 + work.sequence.target] for work in step if work.samples})
    s.check_integrity()
    return step


def drain(s: Scheduler) -> int:
    """Run to the end; returns the positions computed."""
    computed = 0
    while s.has_work:
        for work in advance(s):
            computed += work.n_tokens
            if work.sequence.n_output == work.sequence.params.max_tokens:
                s.finish(work.sequence)
    return computed


def test_a_sequence_goes_from_prompt_to_tokens() -> None:
    s = scheduler(chunk_size=8)
    one = sequence("a", [1] * 20, max_tokens=3)
    s.add(one)
    spans = [[(w.start, w.n_tokens, w.samples) for w in advance(s)] for _ in range(5)]
    assert spans == [[(0, 8, False)], [(8, 8, False)], [(16, 4, True)], [(20, 1, True)], [(21, 1, True)]]
    assert one.token_ids[20:] == [1020, 1021, 1022]
    assert (one.prompt_len, one.n_output, one.computed, one.target) == (20, 3, 22, 23)
    s.finish(one)
    assert not s.has_work
    assert s.schedule(0.0) is None
    assert s.kv.n_held == 0


def test_first_admission_notes_time_and_cached_tokens() -> None:
    s = scheduler()
    s.add(sequence("a", [1] * 20))
    drain(s)
    again = sequence("b", [1] * 20)
    s.add(again)
    advance(s, now=3.5)
    assert (again.first_scheduled, again.cached_tokens) == (3.5, 16)
    assert (s.prefix_queries, s.prefix_hits) == (40, 16)


def test_choices_of_one_request_compute_their_prompt_once() -> None:
    s = scheduler()
    prompt = list(range(41))
    for choice in range(4):
        s.add(sequence("a", prompt, max_tokens=1, choice=choice))
    assert drain(s) == 41 + 3 * 1


def test_a_conversation_reuses_its_own_answer() -> None:
    s = scheduler()
    first = sequence("a", [1] * 20, max_tokens=13)
    s.add(first)
    drain(s)
    second = sequence("b", [*first.token_ids, 5, 6])
    s.add(second)
    drain(s)
    assert second.cached_tokens == 32


def test_a_preempted_sequence_resumes_from_what_is_still_cached() -> None:
    s = scheduler(n_frames=6)
    old, young = sequence("a", [1] * 15, max_tokens=20, arrival=1.0), sequence("b", [2] * 15, max_tokens=20, arrival=2.0)
    s.add(old)
    s.add(young)
    while not s.n_preemptions:
        advance(s)
    assert (old.running, young.running, young.computed, s.n_waiting) == (True, False, 0, 1)
    tokens = list(young.token_ids)
    drain(s)
    assert young.token_ids[: len(tokens)] == tokens
    assert old.token_ids[15:] == young.token_ids[15:] == list(range(1015, 1035))
    assert young.cached_tokens == 0, "the first admission counts"


def test_abort_takes_one_choice_or_all_running_or_waiting() -> None:
    s = scheduler(max_batch_size=2)
    for choice in range(3):
        s.add(sequence("a", [choice] * 9, choice=choice))
    advance(s)
    assert (s.n_running, s.n_waiting) == (2, 1)
    assert [x.id for x in s.abort("a", 0)] == [("a", 0)]
    assert [x.id for x in s.abort("a")] == [("a", 1), ("a", 2)]
    assert s.abort("a") == s.abort("never") == []
    s.check_integrity()
    assert not s.has_work
    assert s.kv.n_held == 0


def test_when_a_leader_is_aborted_a_follower_goes_on_from_what_it_computed() -> None:
    s = scheduler(chunk_size=16)
    prompt = list(range(60))
    for choice in range(3):
        s.add(sequence("a", prompt, choice=choice, max_tokens=1))
    advance(s)
    advance(s)
    s.abort("a", 0)
    (work,) = advance(s)
    assert (work.sequence.choice, work.start) == (1, 32)
    drain(s)


def test_a_sequence_that_ends_between_schedule_and_commit_is_passed_over() -> None:
    s = scheduler()
    one = sequence("a", [1] * 9)
    s.add(one)
    step = s.schedule(0.0)
    assert step is not None
    s.abort("a")
    s.commit(step, {one: [5]})
    assert one.n_output == 0
    s.check_integrity()


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    s = scheduler(n_frames=4)
    numbers = r"prompt has 30 tokens and max_tokens is 3, which together take 5 KV frames, but the KV pool has 4: shorten"
    with pytest.raises(KVBudgetTooSmall, match=numbers):
        s.add(sequence("a", [1] * 30, max_tokens=3))
    assert not s.has_work
    s.add(sequence("a", [1] * 30, max_tokens=2))
    drain(s)


def test_a_request_is_served_until_its_last_choice_ends() -> None:
    s = scheduler()
    for choice in range(2):
        s.add(sequence("a", [1], choice=choice))
    s.abort("a", 0)
    assert s.serves("a")
    s.abort("a")
    assert not s.serves("a")


def test_the_whole_pool_serves_one_sequence_to_its_last_token() -> None:
    for page in (8, 16, 32, 64):
        kv = KVManager([KVGroup("whole", Whole(), ((0, 0),))], 9, BlockManagerConfig(block_size=page))
        s = Scheduler(kv, Limits(8, 64))
        s.add(sequence("a", [1] * 10, max_tokens=62))
        drain(s)
        assert s.n_preemptions == 0


SHARED = list(range(24))


def crowded() -> Scheduler:
    """A pool of 8 frames of which a background sequence holds 4: three over a prompt that others share, one its own."""
    s = scheduler(n_frames=8, chunk_size=200)
    s.add(sequence("low", [*SHARED, 1], priority=2))
    advance(s)
    return s


def test_a_prefix_that_only_the_victim_holds_is_not_counted_as_free_and_as_held() -> None:
    s = crowded()
    s.add(sequence("first", [5] * 23, priority=0, arrival=1.0))
    advance(s)
    s.add(sequence("second", [*SHARED, *[6] * 20], priority=0, arrival=2.0))  # 3 new frames; 1 available, 1 more from the victim
    advance(s)
    assert (s.n_preemptions, s.n_waiting) == (0, 1)
    drain(s)


def test_a_victim_is_not_chosen_for_frames_that_were_just_promised_to_another() -> None:
    s = crowded()
    s.add(sequence("first", [*SHARED, 2], max_tokens=2, priority=0, arrival=1.0))  # rests on the victim's three frames
    s.add(sequence("second", [6] * 45, priority=0, arrival=2.0))
    advance(s)
    assert (s.n_preemptions, s.n_waiting) == (0, 1)
    drain(s)


def test_frames_of_a_victim_are_paid_for_in_full_by_the_next_one_admitted() -> None:
    s = crowded()
    s.add(sequence("first", [6] * 39, max_tokens=2, priority=0, arrival=1.0))  # preempts
    s.add(sequence("second", [*SHARED, 2], max_tokens=2, priority=0, arrival=2.0))  # shares the victim's frames
    advance(s)
    assert (s.n_preemptions, s.n_running, s.n_waiting) == (1, 1, 2)
    drain(s)
