"""Every request ends once with the tokens of its run alone, whatever the load; and faults put into the room are seen (world.py)."""

from collections.abc import Callable, Hashable, Iterable

import pytest
from world import Setting, World

from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv import frame_store, manager, prefix_tree
from tokenmill.kv.buddy import BuddyAllocator
from tokenmill.kv.budget import SparsePolicy
from tokenmill.kv.companions import Companions
from tokenmill.kv.groups import Whole, Window
from tokenmill.kv.holding import Follower
from tokenmill.kv.manager import KVManager
from tokenmill.kv.prefix_cache import PrefixCache, Rule
from tokenmill.kv.prefix_tree import Node, PrefixTree
from tokenmill.kv.table import PageTable
from tokenmill.scheduler.plan import Work
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.sequence import Sequence

PLAIN = Setting()
WINDOWS = Setting((Whole(), Window(20), Window(20), Whole(), Window(8)))
ONLY_WINDOWS = Setting((Window(24), Window(13)))
BUDGETS = Setting((Whole(), Window(16)), budgets=(4, 30))
POSITIONS = Setting((Whole(), Whole()), SparsePolicy("topk_positions", keep_ratio=0.6, sinks=8), budgets=(14, 30))
POSITIONS_AND_WINDOWS = Setting((Window(20), Whole()), SparsePolicy("topk_positions", keep_ratio=0.8, sinks=16), budgets=(13, 24))
HEADS = Setting((Whole(), Streaming(16, 24), Streaming(16, 24)), SparsePolicy("topk_heads"), budgets=(8, 24))
HEADS_AND_WINDOWS = Setting((Whole(), Streaming(0, 16), Window(30)), SparsePolicy("topk_heads", keep_ratio=0.5), budgets=(8, 24))


SETTINGS = [WINDOWS, ONLY_WINDOWS, BUDGETS, POSITIONS, POSITIONS_AND_WINDOWS, HEADS, HEADS_AND_WINDOWS]
NAMES = ["windows", "only windows", "budgets", "positions", "positions and windows", "heads", "heads and windows"]


def run_worlds(setting: Setting, seeds: range) -> list[World]:
    worlds = []
    for seed in seeds:
        world = World(seed, setting)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        worlds.append(world)
    return worlds


def counts(worlds: list[World]) -> list[int]:
    """Of what a load is to have a lot of: preemptions, drafted tokens that were right and that were wrong."""
    right, drafted = sum(world.right for world in worlds), sum(world.drafted for world in worlds)
    return [sum(world.scheduler.n_preemptions for world in worlds), right, drafted - right]


@pytest.mark.parametrize("block", range(10))
def test_every_request_ends_once_with_the_tokens_of_its_run_alone(block: int) -> None:
    worlds = run_worlds(PLAIN, range(block * 40, block * 40 + 40))
    done = [world.scheduler for world in worlds]
    figures = [*counts(worlds), sum(s.kv.n_evictions for s in done), sum(s.prefix_hits for s in done)]
    assert min(figures) > 100, f"the load is too light to show anything: {figures}"


@pytest.mark.parametrize("setting", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("block", range(3))
def test_so_it_is_with_windows_budgets_and_dropped_frames(setting: Setting, block: int) -> None:
    worlds = run_worlds(setting, range(block * 20, block * 20 + 20))
    done = [world.scheduler for world in worlds]
    figures = [*counts(worlds), sum(s.kv.n_evictions for s in done) // 10, sum(s.prefix_hits for s in done) // 10]
    if setting.policy.strategy != "none":
        figures.append(sum(s.n_sparsified for s in done))
    assert min(figures) > 15, f"the load is too light to show anything: {figures}"


Patch = Callable[[pytest.MonkeyPatch], None]


def reuse_the_last_token_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frame_store, "_reusable", lambda tokens, limit: tokens[: len(tokens) // FRAME * FRAME if limit is None else limit])


def share_a_frame_before_it_is_full(patch: pytest.MonkeyPatch) -> None:
    commit = KVManager.commit
    patch.setattr(KVManager, "commit", lambda kv, i, tokens, computed: commit(kv, i, tokens, min(len(tokens), computed + 1)))


def keep_the_reference_on_release(patch: pytest.MonkeyPatch) -> None:
    release = PrefixTree.release

    def skipping(tree: PrefixTree, node: Node) -> None:
        if node.refs != 2:
            release(tree, node)

    patch.setattr(PrefixTree, "release", skipping)


def free_a_duplicate_but_go_on_with_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageTable, "replace", lambda table, start, frames: None)


def take_one_differing_frame_for_equal(patch: pytest.MonkeyPatch) -> None:
    common = Node.common

    def generous(node: Node, data: bytes, at: int) -> int:
        return min(len(node.frames), common(node, data, at) + 1, (len(data) - at) // prefix_tree._STEP)

    patch.setattr(Node, "common", generous)


def compare_only_the_first_tokens_of_a_frame(patch: pytest.MonkeyPatch) -> None:
    encode = prefix_tree._encode
    patch.setattr(prefix_tree, "_encode", lambda tokens: encode([0 if i % FRAME == FRAME - 1 else t for i, t in enumerate(tokens)]))


def evict_the_frame_before_the_tail(patch: pytest.MonkeyPatch) -> None:
    evict = PrefixTree.evict
    patch.setattr(PrefixTree, "evict", lambda tree, count: [max(0, frame - 1) for frame in evict(tree, count)])


def forget_that_a_branch_is_in_use_when_splitting(patch: pytest.MonkeyPatch) -> None:
    split = PrefixTree._split

    def forgetting(tree: PrefixTree, node: Node, at: int) -> Node:
        upper = split(tree, node, at)
        upper.uses = 0
        return upper

    patch.setattr(PrefixTree, "_split", forgetting)


def promise_frames_that_others_hold(patch: pytest.MonkeyPatch) -> None:
    would_idle = PrefixTree.would_idle
    patch.setattr(PrefixTree, "would_idle", lambda tree, node: would_idle(tree, node) + 3)


def join_pages_that_are_not_buddies(patch: pytest.MonkeyPatch) -> None:
    give = BuddyAllocator._give
    patch.setattr(BuddyAllocator, "_give", lambda pool, first, order: give(pool, first, min(3, order + 1) if first % 16 == 0 else order))


def go_on_where_it_was_after_preemption(patch: pytest.MonkeyPatch) -> None:
    acquire = KVManager.acquire
    patch.setattr(KVManager, "acquire", lambda kv, i, tokens, salt, limit: acquire(kv, i, tokens, salt, limit) + FRAME * (len(tokens) > 40))


def write_the_last_extent_one_frame_early(patch: pytest.MonkeyPatch) -> None:
    append = PageTable.append

    def shifted(table: PageTable, first: int, count: int) -> None:
        append(table, first - 1 if len(table.first) > 2 and first else first, count)

    patch.setattr(PageTable, "append", shifted)


def give_back_a_frame_too_many(patch: pytest.MonkeyPatch) -> None:
    low = Follower.low
    patch.setattr(Follower, "low", lambda follower, computed: min(computed // FRAME, low(follower, computed) + 1))


def find_a_prefix_whose_window_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Companions, "reach", lambda companions, keys, end, window: end)
    ref = Companions.ref
    patch.setattr(Companions, "ref", lambda companions, keys: ref(companions, [k for k in keys if k in companions]))


def look_one_frame_too_short_for_a_hit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rule, "first", lambda rule, end: 0 if rule.window is None else max(0, end - max(0, rule.window - 1)))


def leave_companions_behind_when_their_key_goes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Companions, "forget", lambda companions, key: ())


def evict_companions_that_are_in_use(patch: pytest.MonkeyPatch) -> None:
    def careless(companions: Companions, keys: Iterable[int], tick: int) -> int:
        count = 0
        for key in keys:
            entry = companions._entries[key]
            entry.refs -= 1
            companions._idle[key] = tick
            count += 1
        return count

    patch.setattr(Companions, "unref", careless)


def go_on_with_an_own_companion_where_there_is_one(patch: pytest.MonkeyPatch) -> None:
    put = Companions.put
    patch.setattr(Companions, "put", lambda companions, key, frames: (put(companions, key, frames), frames)[1])


def take_promised_frames_for_everybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVManager, "available", property(lambda kv: kv.n_free + kv.n_cached))


WINDOW_FAULTS: list[Patch] = [
    give_back_a_frame_too_many,
    find_a_prefix_whose_window_is_gone,
    look_one_frame_too_short_for_a_hit,
    leave_companions_behind_when_their_key_goes,
    evict_companions_that_are_in_use,
    go_on_with_an_own_companion_where_there_is_one,
    take_promised_frames_for_everybodys,
]


def share_what_a_sparse_sequence_computes(patch: pytest.MonkeyPatch) -> None:
    commit = KVManager.commit

    def sharing(kv: KVManager, seq_id: Hashable, tokens: list[int], computed: int) -> None:
        holding = kv._holdings[seq_id]
        sparse, holding.sparse = holding.sparse, False
        commit(kv, seq_id, tokens, computed)
        holding.sparse = sparse

    patch.setattr(KVManager, "commit", sharing)


def find_prefixes_beyond_the_rows_that_weigh(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "reuse_limit", property(lambda sequence: None if sequence.reuse else 0))


def drop_the_earliest_instead_of_the_lightest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager, "lightest", lambda weights, candidates, count: list(candidates)[:count])


def keep_weights_over_a_preemption(patch: pytest.MonkeyPatch) -> None:
    restart = Sequence.restart

    def forgetful(sequence: Sequence) -> None:
        weights = sequence.weights
        restart(sequence)
        sequence.weights = weights

    patch.setattr(Sequence, "restart", forgetful)


def stay_on_the_ladder_over_a_preemption(patch: pytest.MonkeyPatch) -> None:
    restart = Sequence.restart

    def climbing(sequence: Sequence) -> None:
        climbed = sequence.climbed
        restart(sequence)
        sequence.climbed = climbed

    patch.setattr(Sequence, "restart", climbing)


def weigh_from_the_point_on(patch: pytest.MonkeyPatch) -> None:
    def stop(sequence: Sequence, start: int) -> int:
        return sequence.target if sequence.rung is None else min(sequence.target, sequence.rung.point)

    patch.setattr(Sequence, "stop", stop)


def free_dropped_frames_that_others_share(patch: pytest.MonkeyPatch) -> None:
    leave = PrefixCache.leave

    def freeing(cache: PrefixCache, rule: int, keys: list[int]) -> int:
        for key in keys:
            entry = cache._companions[rule]._entries[key]
            if entry.refs > 1:
                entry.refs = 1
        return leave(cache, rule, keys)

    patch.setattr(PrefixCache, "leave", freeing)


def draft_beyond_a_point(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "draft_room", property(lambda s: s.params.max_tokens - s.n_output - 1))


def leave_a_wrong_draft_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    """Share frames up to the end of what was computed, as if all of the draft had been right."""
    commit, schedule = KVManager.commit, Scheduler.schedule
    drafts: dict[object, int] = {}

    def noting(scheduler: Scheduler, now: float) -> list[Work] | None:
        step = schedule(scheduler, now)
        drafts.update((work.sequence.id, len(work.draft)) for work in step or ())
        return step

    def sharing(kv: KVManager, seq_id: Hashable, tokens: list[int], computed: int) -> None:
        commit(kv, seq_id, tokens, min(len(tokens), computed + drafts[seq_id]))

    patch.setattr(Scheduler, "schedule", noting)
    patch.setattr(KVManager, "commit", sharing)


BUDGET_FAULTS: list[Patch] = [
    draft_beyond_a_point,
    share_what_a_sparse_sequence_computes,
    find_prefixes_beyond_the_rows_that_weigh,
    drop_the_earliest_instead_of_the_lightest,
    keep_weights_over_a_preemption,
    stay_on_the_ladder_over_a_preemption,
    weigh_from_the_point_on,
    free_dropped_frames_that_others_share,
]

FAULTS: list[Patch] = [
    leave_a_wrong_draft_in_the_cache,
    reuse_the_last_token_too,
    share_a_frame_before_it_is_full,
    keep_the_reference_on_release,
    free_a_duplicate_but_go_on_with_it,
    take_one_differing_frame_for_equal,
    compare_only_the_first_tokens_of_a_frame,
    evict_the_frame_before_the_tail,
    forget_that_a_branch_is_in_use_when_splitting,
    promise_frames_that_others_hold,
    join_pages_that_are_not_buddies,
    go_on_where_it_was_after_preemption,
    write_the_last_extent_one_frame_early,
]


OF_SETTING = [(PLAIN, FAULTS), (WINDOWS, WINDOW_FAULTS), (POSITIONS, BUDGET_FAULTS)]
ALL_FAULTS = [(setting, fault) for setting, faults in OF_SETTING for fault in faults]


@pytest.mark.parametrize(("setting", "fault"), ALL_FAULTS, ids=[fault.__name__ for _, fault in ALL_FAULTS])
@pytest.mark.parametrize("checked", [True, False], ids=["with integrity checks", "by tokens alone"])
def test_a_seeded_fault_is_caught(setting: Setting, fault: Patch, checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    if not checked:
        monkeypatch.setattr(Scheduler, "check_integrity", lambda scheduler, others=0: None)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_worlds(setting, range(120))
