"""Where frames are that no sequence has to itself, and the ways in which they get into tables and out again.

The store joins the pool (free frames) with the prefix cache (those that can be found again): a page that is taken evicts what it needs,
a frame that is given back goes where it came from. It is told which sequence's holding to change, and keeps none: who holds what, what is
out of sight and what is promised to whom is for the manager to say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.messages import PageCounts
from tokenmill.core.types import FRAME
from tokenmill.kv.buddy import BuddyAllocator
from tokenmill.kv.counts import count_pages
from tokenmill.kv.groups import KVGroup, Window
from tokenmill.kv.holding import Follower, Holding, find_followers
from tokenmill.kv.integrity import find_owners
from tokenmill.kv.policy import page_frames
from tokenmill.kv.prefix_cache import PrefixCache
from tokenmill.kv.prefix_tree import MISS, PrefixHit
from tokenmill.kv.table import HOLE, PageTable, runs


class FrameStore:
    """The pool and the prefix cache over it.

    lead: the group whose frames are the keys of the prefix tree, if there is one. followers: the rules of all other groups, which
    methods name by their numbers. n_evictions: frames that the cache gave up, since the start. on_eviction: is told which.
    """

    def __init__(self, groups: Sequence[KVGroup], lead: int | None, n_frames: int, config: BlockManagerConfig) -> None:
        self.followers = find_followers(groups, lead)
        self.shares_prefixes = config.shares_prefixes
        self.n_evictions = 0
        self.on_eviction: Callable[[Sequence[int]], None] | None = None
        self._lead = lead
        self._slides = tuple(isinstance(group.retention, Window) for group in groups)
        self._smallest = config.smallest_page // FRAME
        self._largest = config.largest_page // FRAME
        self._pool = BuddyAllocator(n_frames)
        self._cache = PrefixCache([follower.rule for follower in self.followers], leads=lead is not None)

    @property
    def n_free(self) -> int:
        return self._pool.n_free

    @property
    def n_cached(self) -> int:
        """Frames in the prefix cache that nobody references."""
        return self._cache.n_idle

    @property
    def n_shared(self) -> int:
        """Frames that several sequences reference."""
        return self._cache.n_shared

    @property
    def available(self) -> int:
        """Frames that `extend` can get: free ones, and cached ones by eviction."""
        return self._pool.n_free + self._cache.n_idle

    def match(self, tokens: Sequence[int], salt: str, limit: int | None) -> PrefixHit:
        """What `open` would find. Changes nothing."""
        if not self.shares_prefixes or limit == 0:
            return MISS
        return self._cache.match(_reusable(tokens, limit), salt)

    def open(self, tokens: Sequence[int], salt: str, limit: int | None) -> Holding:
        """A new sequence's holding: tables over what the prefix cache has of its tokens, of `limit` of them at most."""
        found = self._cache.acquire(_reusable(tokens, limit) if self.shares_prefixes else (), salt)
        tables = tuple(PageTable() for _ in self._slides)
        keys = PageTable() if self._lead is None else tables[self._lead]
        for first, count in runs(found.keys):
            keys.append(first, count)
        shared = len(found.keys)
        for follower, frames in zip(self.followers, found.companions, strict=True):
            for number, group in enumerate(follower.groups):
                if len(frames) < shared:
                    tables[group].append(HOLE, shared - len(frames))
                for first, count in runs(each[number] for each in frames):
                    tables[group].append(first, count)
        return Holding(tables, keys, found.node, shared, shared, self._slides, shared * FRAME)

    def extend(self, table: PageTable, lacks: int, spare: int, context: int) -> int:
        """Append at least the frames that a table lacks, and at most `spare` more; returns how many.

        context: the tokens of a sequence that would grow by pages of the size that is wanted here.
        """
        left = lacks
        while left > 0:
            wanted = page_frames(left, spare, context, self._smallest, self._largest)
            most = max(left, wanted)
            if most > self._pool.n_free:
                self._make_free(most)
            first, count = self._pool.allocate(wanted)
            table.append(first, count)
            left -= count
        return lacks - left

    def share(self, holding: Holding, tokens: Sequence[int], stop: int) -> None:
        """Offer the frames [shared, stop) of every group to the prefix cache, and go on with those that it has for these tokens."""
        start = holding.shared
        own = holding.keys.frames(start, stop) if self._lead is not None else None
        offered = [_columns(holding, follower, start, stop) for follower in self.followers] if self.followers else []
        kept = self._cache.extend(holding.node, tokens[start * FRAME : stop * FRAME], own, offered)
        holding.node = kept.node
        holding.shared = stop
        if own is None:
            for first, count in runs(kept.keys):
                holding.keys.append(first, count)
        elif own != kept.keys:
            self._exchange(holding.keys, start, own, kept.keys)
        for number, mine in enumerate(offered):
            theirs = kept.companions[number]
            if mine != theirs:
                for at, group in enumerate(self.followers[number].groups):
                    self._exchange(holding.tables[group], start, [each[at] for each in mine], [each[at] for each in theirs])

    def punch(self, holding: Holding, number: int, start: int, stop: int) -> int:
        """Make [start, stop) a hole in the groups of a rule; returns how many frames are available by that.

        What becomes idle in the cache was used later than all that is idle there.
        """
        self._cache.advance()
        gained = self._leave(holding, number, start, stop)
        for group in self.followers[number].groups:
            holding.tables[group].punch(start, stop)
        return gained

    def truncate(self, table: PageTable, keep: int) -> None:
        """Free all but the first `keep` frames of a table, which cover what is shared."""
        if keep < table.n_frames:
            self._free_extents(table.extents(keep, table.n_frames))
            table.truncate(keep)

    def close(self, holding: Holding) -> None:
        """Shared frames lose a reference, private ones are free."""
        self._cache.release(holding.node)
        for number in range(len(self.followers)):
            self._leave(holding, number, 0, max(table.n_frames for table in holding.tables))
        if self._lead is not None:
            self._free_extents(holding.keys.extents(holding.shared, holding.keys.n_frames))

    def closable(self, holding: Holding) -> int:
        """Frames that `close` would make available."""
        count = holding.private + self._cache.would_idle(holding.node)
        for number, follower in enumerate(self.followers):
            count += sum(self._cache.sole(number, keys) for keys in follower.shared(holding))
        return count

    def count_pages(self, tables: Iterable[PageTable]) -> dict[int, PageCounts]:
        """As the function of that name; tables: of all sequences."""
        return count_pages(self._pool, tables)

    def find_owners(self, holdings: Mapping[Hashable, Holding]) -> tuple[int, int, int, int]:
        """As the function of that name; holdings: of all sequences."""
        return find_owners(self._pool, self._cache, holdings, self.followers)

    def _exchange(self, table: PageTable, start: int, own: list[int], kept: list[int]) -> None:
        """Go on with the cache's frames; free those of the table's own that it did not take."""
        table.replace(start, kept)
        self._free_frames([mine for mine, theirs in zip(own, kept, strict=True) if mine != theirs])

    def _leave(self, holding: Holding, number: int, start: int, stop: int) -> int:
        """Drop references on the shared frames of [start, stop), free the private ones; returns how many are available by that."""
        groups = self.followers[number].groups
        border = min(max(holding.shared, start), stop)
        gained = 0
        if start < border:
            for begin, end in holding.tables[groups[0]].held(start, border):
                gained += self._cache.leave(number, holding.keys.frames(begin, end))
        for group in groups:
            table = holding.tables[group]
            if border < table.n_frames:
                gained += self._free_extents(table.extents(border, min(stop, table.n_frames)))
        return gained

    def _make_free(self, n_frames: int) -> None:
        gone = self._cache.evict(n_frames - self._pool.n_free)
        self._free_frames(gone)
        self.n_evictions += len(gone)
        if self.on_eviction is not None:
            self.on_eviction(gone)

    def _free_extents(self, extents: Sequence[tuple[int, int]]) -> int:
        """Free what is not a hole; returns how many frames that is."""
        total = 0
        for first, count in extents:
            if first != HOLE:
                self._pool.free(first, count)
                total += count
        return total

    def _free_frames(self, frames: Sequence[int]) -> None:
        for first, count in runs(frames):
            self._pool.free(first, count)


def _reusable(tokens: Sequence[int], limit: int | None) -> Sequence[int]:
    """Whole frames that leave at least one token to compute, and of `limit` tokens at most."""
    most = max(0, len(tokens) - 1) if limit is None else min(max(0, len(tokens) - 1), limit)
    return tokens[: most // FRAME * FRAME]


def _columns(holding: Holding, follower: Follower, start: int, stop: int) -> list[tuple[int, ...]]:
    """Per frame of positions in [start, stop), the rule's frames."""
    return list(zip(*(holding.tables[group].frames(start, stop) for group in follower.groups), strict=True))
