"""The plan, on a KV view made of plain numbers: what it decides, and that it changes nothing."""

from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from tokenmill.core.types import FRAME, SamplingParams
from tokenmill.kv.budget import Ladder
from tokenmill.kv.footprint import frames_for
from tokenmill.kv.prefix_tree import MISS, PrefixHit
from tokenmill.scheduler.plan import Limits, Plan, plan
from tokenmill.scheduler.sequence import Sequence


@dataclass
class Frames:
    """covered tokens per running sequence, frames that releasing each would yield, prefix hits per first token."""

    available: int = 1000
    shares_prefixes: bool = True
    covers: dict[Hashable, int] = field(default_factory=dict)
    yields: dict[Hashable, int] = field(default_factory=dict)
    hits: dict[int, PrefixHit] = field(default_factory=dict)
    others: int = 0

    @property
    def n_holders(self) -> int:
        return len(self.covers) + self.others

    def covered(self, seq_id: Hashable) -> int:
        return self.covers[seq_id]

    @property
    def n_groups(self) -> int:
        return 1

    def missing(self, seq_id: Hashable, n_tokens: int, step: int) -> int:
        return max(0, frames_for(n_tokens) - self.covers[seq_id] // FRAME)

    def fresh(self, hit: PrefixHit, goal: int, chunk: int, ladder: Ladder | None) -> int:
        return frames_for(goal) - hit.frames

    def releasable(self, seq_id: Hashable) -> int:
        return self.yields.get(seq_id, 0)

    def match(self, tokens: Ordered[int], salt: str, limit: int | None) -> PrefixHit:
        return self.hits.get(tokens[0], MISS)


def sequence(
    name: str, tokens: int, *, first: int = 0, computed: int = 0, priority: int = 1, choice: int = 0, reuse: bool = True
) -> Sequence:
    """A sequence whose arrival follows its name; `first` tells prompts apart."""
    token_ids = [first or ord(name[0])] * tokens
    made = Sequence(name, choice, token_ids, SamplingParams(max_tokens=100), 0, priority, float(ord(name[0])), reuse=reuse)
    made.computed = computed
    return made


def running(kv: Frames, name: str, tokens: int, left: int = 1, covers: int | None = None, yields: int = 0, priority: int = 1) -> Sequence:
    made = sequence(name, tokens, computed=tokens - left, priority=priority)
    kv.covers[made.id] = covers if covers is not None else tokens + FRAME
    kv.yields[made.id] = yields
    return made


def names(sequences: list[Sequence]) -> list[str]:
    return [s.request_id for s in sequences]


def work(decision: Plan) -> list[tuple[str, int, int, bool]]:
    return [(w.sequence.request_id, w.start, w.n_tokens, w.samples) for w in decision.work]


LIMITS = Limits(max_batch_size=8, chunk_size=64)


def test_all_running_sequences_decode_whatever_the_prompt_budget() -> None:
    kv = Frames()
    decoding = [running(kv, name, 20) for name in "abcde"]
    decision = plan([sequence("p", 100)], decoding, LIMITS, kv)
    assert work(decision) == [(name, 19, 1, True) for name in "abcde"] + [("p", 0, 64, False)]


def test_the_prompt_budget_goes_in_order_and_cuts_anywhere() -> None:
    kv = Frames()
    decision = plan([sequence("b", 30), sequence("c", 30)], [running(kv, "a", 100, left=50)], LIMITS, kv)
    assert work(decision) == [("a", 50, 50, True), ("b", 0, 14, False)]
    assert names(decision.admit) == ["b"], "without budget left nobody is admitted"


BOUNDED = Limits(max_batch_size=64, chunk_size=64, max_rows=30)


def test_where_steps_are_bounded_prompts_get_what_decoding_leaves() -> None:
    kv = Frames()
    decoding = [running(kv, name, 20) for name in "abcde"]
    assert work(plan([sequence("p", 100)], decoding, BOUNDED, kv))[5:] == [("p", 0, 25, False)]
    decoding[0].draft = (1, 2, 3)
    decision = plan([sequence("p", 100)], decoding, BOUNDED, kv)
    assert work(decision)[5:] == [("p", 0, 22, False)], "a draft's rows are rows"
    assert decision.work[0].draft == (1, 2, 3), "and it gets them: the bound is on prompts"


def test_bounded_steps_bound_nothing_where_nobody_decodes() -> None:
    kv = Frames()
    assert work(plan([sequence("p", 100)], [], BOUNDED, kv)) == [("p", 0, 64, False)]
    assert work(plan([], [running(kv, "a", 100, left=100)], BOUNDED, kv)) == [("a", 0, 64, False)]


def test_prompts_get_a_frame_and_a_quarter_of_the_streams_however_long_steps_are() -> None:
    kv = Frames()
    decoding = [running(kv, chr(200 + number), 20) for number in range(48)]
    full = Limits(max_batch_size=64, chunk_size=64, max_rows=1)
    assert work(plan([sequence("p", 100)], decoding[:5], full, kv))[5:] == [("p", 0, 8, False)]
    for name in range(5, 48):
        assert decoding[name].id in kv.covers
    assert work(plan([sequence("p", 100)], decoding, full, kv))[48:] == [("p", 0, 12, False)]


def test_all_the_rest_of_a_chunk_is_for_drafts() -> None:
    kv = Frames()
    one = running(kv, "a", 20, covers=120)
    one.draft = tuple(range(63))
    decision = plan([], [one], Limits(max_batch_size=8, chunk_size=64, max_rows=1), kv)
    assert len(decision.work[0].draft) == 63
    decision = plan([sequence("p", 100)], [one], Limits(max_batch_size=8, chunk_size=64, max_rows=1), kv)
    assert [(len(w.draft), w.n_tokens) for w in decision.work] == [(56, 1), (0, 8)]


def test_a_higher_priority_prompt_is_served_before_a_running_prefill() -> None:
    kv = Frames()
    decision = plan([sequence("z", 40, priority=0)], [running(kv, "a", 100, left=50)], LIMITS, kv)
    assert work(decision) == [("z", 0, 40, True), ("a", 50, 24, False)]


def test_without_chunking_a_prompt_is_computed_whole() -> None:
    limits = Limits(max_batch_size=8, chunk_size=64, chunked_prefill=False)
    waiting = [sequence("a", 500), sequence("b", 10)]
    assert work(plan(waiting, [], limits, Frames())) == [("a", 0, 500, True)]
    waiting = [sequence("a", 40), sequence("b", 30), sequence("c", 5)]
    assert work(plan(waiting, [], limits, Frames())) == [("a", 0, 40, True)], "the second waits for a step that holds it whole"


def test_the_batch_size_bounds_admission() -> None:
    kv = Frames()
    decision = plan([sequence(n, 2) for n in "xyz"], [running(kv, n, 20) for n in "abcdefg"], LIMITS, kv)
    assert names(decision.admit) == ["x"]


def test_a_large_head_is_not_overtaken() -> None:
    kv = Frames(available=5)
    assert names(plan([sequence("x", 60), sequence("y", 2)], [running(kv, "a", 20)], LIMITS, kv).admit) == []


def test_admission_leaves_a_spare_frame_per_running_sequence() -> None:
    kv = Frames(available=4)
    batch = [running(kv, name, 20) for name in "abc"]
    assert names(plan([sequence("x", 8)], batch, LIMITS, kv).admit) == []  # 2 frames + 3 spare
    kv.available = 5
    assert names(plan([sequence("x", 8)], batch, LIMITS, kv).admit) == ["x"]


def test_a_prompt_alone_may_use_the_whole_pool() -> None:
    decision = plan([sequence("x", 31)], [], LIMITS, Frames(available=4))
    assert [(s.request_id, n) for s, n, *_ in decision.reserve] == [("x", 32)]


def test_reused_frames_cost_nothing_when_held_and_themselves_when_idle() -> None:
    kv = Frames(available=4)
    batch = [running(kv, "a", 20)]
    kv.hits[ord("x")] = PrefixHit(frames=7, idle=0, held=7)
    assert work(plan([sequence("x", 60)], batch, LIMITS, kv))[-1] == ("x", 56, 4, True)  # 8 - 7 + 1 spare
    kv.hits[ord("x")] = PrefixHit(frames=7, idle=3, held=7)
    assert names(plan([sequence("x", 60)], batch, LIMITS, kv).admit) == []


def test_a_sequence_that_may_not_reuse_is_planned_from_zero() -> None:
    kv = Frames(hits={ord("x"): PrefixHit(4, 0, 4)})
    assert work(plan([sequence("x", 60, reuse=False)], [], LIMITS, kv)) == [("x", 0, 60, True)]


def test_growth_preempts_the_youngest_of_the_lowest_priority() -> None:
    kv = Frames(available=0)
    batch = [running(kv, "a", 17, covers=16), running(kv, "b", 20, yields=5), running(kv, "c", 20, yields=5, priority=2)]
    decision = plan([sequence("x", 4)], batch, LIMITS, kv)
    assert names(decision.preempt) == ["c"]
    assert names(decision.admit) == [], "a step that preempts for growth admits nobody"
    assert [w[0] for w in work(decision)] == ["a", "b"]
    assert [(s.request_id, n) for s, n, *_ in decision.reserve] == [("a", 17)]


def test_the_youngest_preempts_itself_rather_than_an_elder() -> None:
    kv = Frames(available=0)
    decision = plan([], [running(kv, "a", 20, yields=5), running(kv, "b", 17, covers=16, yields=2)], LIMITS, kv)
    assert names(decision.preempt) == ["b"]
    assert [w[0] for w in work(decision)] == ["a"]


def test_the_first_in_order_is_never_preempted() -> None:
    kv = Frames(available=0)
    batch = [running(kv, "a", 17, covers=16), running(kv, "b", 20), running(kv, "c", 20)]  # the others yield nothing they own alone
    decision = plan([], batch, LIMITS, kv)
    assert names(decision.preempt) == ["c", "b"]
    assert work(decision) == [("a", 16, 1, True)]


def test_a_higher_priority_takes_frames_and_place_from_a_lower_one() -> None:
    kv = Frames(available=1)
    batch = [running(kv, "a", 20, yields=4), running(kv, "b", 20, yields=4, priority=2)]
    decision = plan([sequence("v", 20, priority=0)], batch, LIMITS, kv)
    assert (names(decision.preempt), names(decision.admit)) == (["b"], ["v"])
    assert [w[0] for w in work(decision)] == ["a", "v"]
    full = Limits(max_batch_size=2, chunk_size=64)
    kv.available = 100
    assert names(plan([sequence("v", 20, priority=0)], batch, full, kv).preempt) == ["b"]


def test_two_of_higher_priority_can_push_out_two_in_one_step() -> None:
    kv = Frames()
    batch = [running(kv, "a", 20, yields=4, priority=2), running(kv, "b", 20, yields=4, priority=2)]
    decision = plan([sequence("v", 20, priority=0), sequence("w", 20, priority=0)], batch, Limits(2, 64), kv)
    assert (names(decision.preempt), names(decision.admit)) == (["b", "a"], ["v", "w"])
    assert [w[0] for w in work(decision)] == ["v", "w"]


def test_nobody_behind_a_victim_is_admitted_in_its_stead() -> None:
    kv = Frames(available=1)
    victim = running(kv, "b", 40, left=30, yields=20, priority=2)
    decision = plan([sequence("v", 20, priority=0), sequence("x", 4, priority=2)], [victim], LIMITS, kv)
    assert (names(decision.preempt), names(decision.admit)) == (["b"], ["v"])
    assert work(decision) == [("v", 0, 20, True)]


def test_the_same_priority_takes_nothing() -> None:
    kv = Frames(available=1)
    decision = plan([sequence("A", 20)], [running(kv, "b", 20, yields=4)], LIMITS, kv)
    assert not decision.preempt
    assert not decision.admit


def test_nobody_is_preempted_for_an_admission_that_still_fails() -> None:
    kv = Frames(available=0)
    batch = [running(kv, "a", 20, yields=50), running(kv, "b", 20, yields=2, priority=2)]
    decision = plan([sequence("v", 200, priority=1)], batch, LIMITS, kv)
    assert not decision.preempt
    assert [w[0] for w in work(decision)] == ["a", "b"]


def test_siblings_wait_for_the_first_choice_and_others_pass() -> None:
    siblings = [sequence("s", 40, choice=choice) for choice in range(3)]
    decision = plan([*siblings, sequence("x", 5)], [], LIMITS, Frames())
    assert [s.id for s in decision.admit] == [("s", 0), ("x", 0)]


def test_a_follower_is_admitted_when_the_leader_computes_nothing_more_for_it() -> None:
    kv = Frames(hits={ord("s"): PrefixHit(4, 0, 4)})
    leader = running(kv, "s", 40, left=8)
    follower = sequence("t", 37, first=ord("s"))
    assert names(plan([follower], [leader], LIMITS, kv).admit) == ["t"]  # 36 of its tokens at most: the 4 frames it has
    follower = sequence("t", 40, first=ord("s"))
    assert names(plan([follower], [leader], LIMITS, kv).admit) == ["t"]  # of frame 5 it must compute the last token anyway
    follower = sequence("t", 41, first=ord("s"))
    assert names(plan([follower], [leader], LIMITS, kv).admit) == []  # frame 5 is on its way


def test_nobody_follows_across_salts_or_without_sharing_or_reuse() -> None:
    leader = sequence("s", 40)
    other_salt = Sequence("t", 0, [ord("s")] * 40, SamplingParams(max_tokens=1), 0, arrival=200.0, cache_salt="x")
    assert len(plan([leader, other_salt], [], Limits(8, 100), Frames()).admit) == 2
    follower = sequence("t", 40, first=ord("s"))
    assert len(plan([leader, follower], [], Limits(8, 100), Frames(shares_prefixes=False)).admit) == 2
    stubborn = sequence("t", 40, first=ord("s"), reuse=False)
    assert len(plan([leader, stubborn], [], Limits(8, 100), Frames()).admit) == 2


def test_a_higher_priority_does_not_wait_for_a_lower_one() -> None:
    kv = Frames()
    leader = running(kv, "s", 40, left=30, priority=2)
    assert names(plan([sequence("t", 40, first=ord("s"), priority=0)], [leader], LIMITS, kv).admit) == ["t"]


def test_followers_keep_their_places_in_the_batch() -> None:
    waiting = [sequence("s", 40, choice=choice) for choice in range(3)] + [sequence("x", 5)]
    assert [s.id for s in plan(waiting, [], Limits(3, 64), Frames()).admit] == [("s", 0)]


def test_planning_changes_nothing_and_repeats_itself() -> None:
    kv = Frames(available=3)
    batch = [running(kv, "a", 17, covers=16), running(kv, "b", 60, left=20, yields=3), running(kv, "c", 20, yields=9, priority=2)]
    waiting = [sequence("v", 20, priority=0), sequence("x", 4)]
    state = [(s.id, s.computed, list(s.token_ids)) for s in (*batch, *waiting)]
    first = plan(waiting, batch, LIMITS, kv)
    assert first == plan(waiting, batch, LIMITS, kv)
    assert state == [(s.id, s.computed, list(s.token_ids)) for s in (*batch, *waiting)]


def test_alone_a_sequence_takes_all_there_is_but_not_what_is_held_for_others() -> None:
    waiting = [sequence("a", 50)]
    assert names(plan(waiting, [], LIMITS, Frames(available=7)).admit) == ["a"]
    assert names(plan(waiting, [], LIMITS, Frames(available=6, others=0)).admit) == ["a"], "what it found in the cache can be given back"
    assert plan(waiting, [], LIMITS, Frames(available=6, others=1)).admit == []
    assert names(plan(waiting, [], LIMITS, Frames(available=7, others=1)).admit) == ["a"]


def test_a_plan_says_when_not_even_the_first_in_order_finds_frames() -> None:
    kv = Frames(available=0)
    first = running(kv, "a", 17, covers=16)
    assert plan([], [first], LIMITS, kv).short
    assert not plan([], [first], LIMITS, Frames(available=1, covers=kv.covers)).short
