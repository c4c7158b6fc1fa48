"""Finding the owner of every frame from scratch, without trusting a counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from tokenmill.core.types import FRAME
from tokenmill.kv.buddy import BuddyAllocator
from tokenmill.kv.holding import Follower, Holding
from tokenmill.kv.prefix_cache import PrefixCache
from tokenmill.kv.table import HOLE


def find_owners(
    pool: BuddyAllocator, cache: PrefixCache, holdings: Mapping[Hashable, Holding], followers: Sequence[Follower]
) -> tuple[int, int, int, int]:
    """Return the number of free, cached, held and shared frames; raises AssertionError where pool, cache and tables disagree."""
    pool.check_integrity()
    references = [Counter(key for h in holdings.values() for keys in follower.shared(h) for key in keys) for follower in followers]
    cache.check_integrity([holding.node for holding in holdings.values()], references)
    owner: dict[int, str] = {}

    def claim(frames: Sequence[int], who: str) -> None:
        for frame in frames:
            assert 0 <= frame < pool.n_frames, f"frame {frame} of {who} is outside the pool"
            assert frame not in owner, f"frame {frame} belongs to {owner.get(frame)} and to {who}"
            owner[frame] = who

    for first, count in pool.free_pages():
        claim(range(first, first + count), "free")
    for frames, live in cache.owned():
        claim(frames, "held" if live else "cached")
    uses: Counter[int] = Counter()
    for seq_id, holding in holdings.items():
        _check(seq_id, holding, cache, followers)
        for table in holding.tables:
            uses.update(frame for frame in table.frames(0, holding.shared) if frame != HOLE)
            claim([frame for frame in table.frames(holding.shared, table.n_frames) if frame != HOLE], "held")
    assert len(owner) == pool.n_frames, f"{pool.n_frames - len(owner)} frames have no owner"
    found = Counter(owner.values())
    return found["free"], found["cached"], found["held"], sum(count > 1 for count in uses.values())


def _check(seq_id: Hashable, holding: Holding, cache: PrefixCache, followers: Sequence[Follower]) -> None:
    """The tables agree with the cache, and those of one rule with each other."""
    assert holding.keys.frames(0, holding.shared) == cache.path(holding.node), f"{seq_id!r} strays from its path in the tree"
    assert holding.covered == min(table.n_frames for table in holding.tables), f"{seq_id!r} covers another number of frames"
    assert holding.covered * FRAME >= holding.computed, f"{seq_id!r} has computed what it has no frames for"
    for number, follower in enumerate(followers):
        tables = [holding.tables[group] for group in follower.groups]
        rows = zip(*(table.frames(0, holding.shared) for table in tables), strict=True)
        cached = [frames for keys in follower.shared(holding) for frames in cache.frames(number, keys)]
        assert [row for row in rows if row[0] != HOLE] == cached, f"{seq_id!r} has other frames than the cache"
        for table in tables:
            held = table.held(0, table.n_frames)
            assert table.present == sum(stop - start for start, stop in held), f"the holes of {seq_id!r} are counted wrong"
            shape = tables[0].held(0, holding.covered)
            assert table.held(0, holding.covered) == shape, f"groups of one rule differ in {seq_id!r}"
        if holding.slides[follower.groups[0]] and follower.low(holding.computed) > follower.sinks:
            assert not tables[0].held(follower.sinks, follower.low(holding.computed)), f"{seq_id!r} holds what is out of its sight"
