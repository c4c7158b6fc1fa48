"""The KV manager with several groups: 100,000 random operations against a twin that recounts everything, and single cases."""

from __future__ import annotations

import pytest
from manager_twin import HEADS, POSITIONS, Twin, manager

from tokenmill.core.messages import PageCounts
from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv.budget import Rung
from tokenmill.kv.footprint import frames_for
from tokenmill.kv.groups import Whole, Window
from tokenmill.kv.manager import KVManager


@pytest.mark.parametrize("seed", range(25))
def test_random_operations_agree_with_a_twin_that_recounts(seed: int) -> None:
    twin = Twin(seed)
    for number in range(4000):
        try:
            twin.act()
            if number % 8 == 0:
                twin.agree_on_counts()
                twin.kv.check_integrity()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, operation {number}: {error}") from error
    for seq_id in list(twin.running):
        twin.release(seq_id)
    twin.kv.check_integrity()
    assert twin.kv.n_held == 0
    if twin.shares:
        assert min(v for k, v in twin.done.items() if k not in ("sparsify", "hole")) > 50, twin.done
        assert twin.done["hole"] > 50 or not any(isinstance(rule, Window) for rule in twin.rules)
    assert twin.done["sparsify"] > 10 or not twin.policy


def run(kv: KVManager, seq_id: str, tokens: list[int], chunk: int = 1000) -> int:
    found = kv.acquire(seq_id, tokens, "")
    for end in range(found + chunk, len(tokens) + chunk, chunk):
        assert kv.reserve(seq_id, len(tokens), min(end, len(tokens)))
        kv.commit(seq_id, tokens, min(end, len(tokens)))
        kv.check_integrity()
    return found


def test_a_window_holds_what_is_in_sight_and_no_more() -> None:
    kv = manager([Whole(), Window(32)], 400)
    run(kv, "a", list(range(1000)), chunk=16)
    whole, window = kv.tables("a")
    assert (whole.present, window.present) == (126, frames_for(1000) - (1001 - 32) // FRAME), "whole pages have two frames by then"
    assert (window.first[0], window.starts[0], window.starts[1]) == (-1, 0, (1001 - 32) // FRAME)
    assert kv.n_cached == 125 - window.present, "what slid away can still be found"


def test_a_prompt_of_any_length_takes_the_frames_of_a_window_and_a_chunk() -> None:
    kv = manager([Window(32)] * 3, 3 * ((32 + 16 + 13) // FRAME))
    kv.acquire("a", tokens := list(range(5000)), "")
    kv.promise("a", 5001, 16)
    assert kv.available == 0
    for end in range(16, 5000, 16):
        assert kv.missing("a", 5001, end) == 0
        assert kv.reserve("a", 5001, end)
        kv.commit("a", tokens, end)
        assert kv.available == 0
    kv.check_integrity()


def test_a_hit_ends_where_a_window_has_gone() -> None:
    kv = manager([Whole(), Window(32)], 300)
    tokens = list(range(800))
    run(kv, "a", tokens)
    kv.release("a")
    assert kv.match(tokens, "").frames == 99
    kv.acquire("b", [7], "")
    assert kv.reserve("b", (kv.n_free // 2) * FRAME), "first what is free"
    assert kv.n_evictions == 0
    assert kv.reserve("b", kv.covered("b") + 20 * FRAME)
    assert kv.n_evictions > 0
    hit = kv.match(tokens, "")
    assert hit.frames == 99, "frames that slid away long before the rest became idle go first"
    assert kv.match(tokens[:200], "").frames < 24


def test_evicting_a_key_takes_its_companions_along() -> None:
    kv = manager([Whole(), Window(64)], 32)
    run(kv, "a", list(range(64)))
    kv.release("a")
    kv.acquire("b", [7], "")
    assert kv.reserve("b", 8 * 9)
    assert kv.n_evictions == 2, "a whole frame and the window's of the same positions"
    assert kv.match([*range(64), 1], "").frames == 7


def test_dropped_frames_come_back_although_their_prefix_is_in_use() -> None:
    kv = manager([Whole(), Streaming(16, 32)], 100, HEADS)
    run(kv, "a", list(range(320)))
    before = kv.available
    kv.sparsify("a", Rung(320, 0))
    freed = 320 // FRAME - 2 - 4
    assert kv.available == before + freed
    assert (kv.dropped("a", 320), kv.use().dropped) == (freed * FRAME, freed)
    assert [kv.tables("a")[1].first[1], list(kv.tables("a")[1].starts)] == [-1, [0, 2, 36]]
    kv.check_integrity()


def test_what_a_sparse_sequence_computes_is_its_own() -> None:
    kv = manager([Whole(), Whole()], 200, POSITIONS)
    tokens = list(range(320))
    run(kv, "a", tokens[:160])
    kv.sparsify("a", Rung(160, 4), [0] * 20)
    assert kv.tables("a")[0].held(0, 20) == [(0, 1), (5, 20)], "of equal weights the earlier frames go"
    assert kv.reserve("a", 320)
    kv.commit("a", tokens, 320)
    kv.check_integrity()
    assert kv.match([*tokens, 1], "").frames == 20
    kv.release("a")
    assert kv.n_cached == 2 * 20


def test_statistics_tell_pages_shared_frames_and_unfilled_positions() -> None:
    kv = manager([Whole(), Window(64)], 100)
    tokens = list(range(70))
    run(kv, "a", tokens)
    run(kv, "b", tokens)
    assert kv.counts().shared == 8 + 8
    assert kv.use().unfilled == 2 * 2 * (72 - 70)
    assert kv.use().references == 2 * 2 * 9
    # 100 frames are 12 pages of 64 tokens, and one of 32 that is cut up; each group has a large one that both hold, and one of 8 for each.
    none = PageCounts(0, 0, 0, 0)
    assert kv.use().pages == {8: PageCounts(0, 4, 0, 0), 16: none, 32: none, 64: PageCounts(10, 2, 0, 2)}


def test_a_companion_with_a_wrong_count_fails_the_integrity_check() -> None:
    kv = manager([Whole(), Window(64)], 100)
    run(kv, "a", list(range(70)))
    kv._store._cache._companions[0].ref([kv.tables("a")[0].first[0]])
    with pytest.raises(AssertionError, match="wrong reference count"):
        kv.check_integrity()


def test_a_hole_in_sight_fails_the_integrity_check() -> None:
    kv = manager([Whole(), Window(64), Window(64)], 100)
    run(kv, "a", list(range(70)))
    kv.tables("a")[2].punch(6, 7)
    with pytest.raises(AssertionError):
        kv.check_integrity()
