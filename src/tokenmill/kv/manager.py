"""The owner of every frame.

For one sequence with `c` computed tokens, of whose frames the first `s` are shared:

| positions              | frames are       | owner                 | given back by                                        |
|------------------------|------------------|-----------------------|------------------------------------------------------|
| [0, 8s)                | full, immutable  | the prefix tree; the  | `release` drops the reference: the frames are then   |
|                        |                  | sequence references   | cached, and evicted when others need them            |
| [8s, c)                | being filled     | the sequence          | `commit` hands full ones to the tree (or frees them, |
|                        |                  |                       | where the tree has that prefix); `release` frees     |
| [c, 8 * table frames)  | reserved, unread | the sequence          | `truncate` and `release` free                        |

and for the pool: free (in the buddy allocator) + cached (in the tree, unreferenced) + held (in the tree and
referenced, or private to a sequence) = total, always. A sequence writes only to positions >= c, hence only into
private frames. Nothing here moves or copies a frame's bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import FRAME
from tokenmill.kv.buddy import BuddyAllocator
from tokenmill.kv.groups import KVGroup, check_groups
from tokenmill.kv.policy import page_frames
from tokenmill.kv.prefix_tree import Node, PrefixHit, PrefixTree
from tokenmill.kv.table import PageTable, runs


def frames_for(n_tokens: int) -> int:
    """Frames that hold `n_tokens` positions."""
    return -(-n_tokens // FRAME)


@dataclass(slots=True)
class _Holding:
    """What one sequence holds: its table, and the tree node up to whose end `shared` frames of it reach."""

    table: PageTable
    node: Node
    shared: int


@dataclass(frozen=True, slots=True)
class KVCounts:
    """Frames by owner, and frames evicted since the start."""

    total: int
    free: int
    cached: int
    held: int
    evictions: int


class KVManager:
    """Page tables of the running sequences, over one pool of frames and one prefix tree.

    groups: the model's KV groups, which share the pool (a frame number covers all layers).
    Sequence ids are any hashable values, unique among the sequences that hold something.
    """

    def __init__(self, groups: Sequence[KVGroup], n_frames: int, config: BlockManagerConfig) -> None:
        self.groups = check_groups(groups)
        self.n_frames = n_frames
        self.shares_prefixes = config.shares_prefixes
        self.n_evictions = 0
        self._smallest = config.smallest_page // FRAME
        self._largest = config.largest_page // FRAME
        self._pool = BuddyAllocator(n_frames)
        self._tree = PrefixTree()
        self._holdings: dict[Hashable, _Holding] = {}

    @property
    def n_free(self) -> int:
        return self._pool.n_free

    @property
    def n_cached(self) -> int:
        return self._tree.n_idle

    @property
    def n_held(self) -> int:
        return self.n_frames - self.available

    @property
    def available(self) -> int:
        """Frames that a reservation can get: free ones, and cached ones by eviction."""
        return self._pool.n_free + self._tree.n_idle

    @property
    def n_holders(self) -> int:
        """Sequences that have a table."""
        return len(self._holdings)

    def counts(self) -> KVCounts:
        return KVCounts(self.n_frames, self.n_free, self.n_cached, self.n_held, self.n_evictions)

    def match(self, tokens: Sequence[int], salt: str) -> PrefixHit:
        """Whole frames of `tokens` that need not be computed; at least the last token always is. Changes nothing."""
        if not self.shares_prefixes:
            return PrefixHit(0, 0)
        return self._tree.match(_reusable(tokens), salt)

    def acquire(self, seq_id: Hashable, tokens: Sequence[int], salt: str, reuse: bool = True) -> int:
        """Open a table over what `match` finds (nothing, when `reuse` is off) and return how many tokens that is."""
        assert seq_id not in self._holdings, f"sequence {seq_id!r} already has a table"
        node, frames = self._tree.acquire(_reusable(tokens) if reuse and self.shares_prefixes else (), salt)
        table = PageTable()
        for first, count in runs(frames):
            table.append(first, count)
        self._holdings[seq_id] = _Holding(table, node, len(frames))
        return len(frames) * FRAME

    def covered(self, seq_id: Hashable) -> int:
        """Token positions that the sequence's table has frames for."""
        return self._holdings[seq_id].table.n_frames * FRAME

    def reserve(self, seq_id: Hashable, n_tokens: int, keep: int = 0) -> bool:
        """Make the table cover positions [0, n_tokens), evicting cached frames where needed.

        keep: frames that must stay available; pages that reach beyond n_tokens are taken only from what is above.
        Returns False, with nothing changed, when there are not enough frames.
        """
        table = self._holdings[seq_id].table
        need = frames_for(n_tokens) - table.n_frames
        if need > self.available:
            return False
        spare = max(0, self.available - max(need, 0) - keep)
        while need > 0:
            wanted = page_frames(need, spare, n_tokens, self._smallest, self._largest)
            self._make_free(max(need, wanted))
            first, count = self._pool.allocate(wanted)
            table.append(first, count)
            need -= count
        return True

    def commit(self, seq_id: Hashable, tokens: Sequence[int], computed: int) -> None:
        """Positions [0, computed) of `tokens` are in their frames: offer the newly full ones to the prefix tree.

        Where another sequence was faster, this table goes on with that one's frames, which hold the same bytes,
        and its own are freed.
        """
        holding = self._holdings[seq_id]
        start, stop = holding.shared, computed // FRAME
        if stop <= start or not self.shares_prefixes:
            return
        own = holding.table.frames(start, stop)
        holding.node, kept = self._tree.extend(holding.node, tokens[start * FRAME : stop * FRAME], own)
        holding.shared = stop
        if kept != own:
            holding.table.replace(start, kept)
            self._free_frames([mine for mine, theirs in zip(own, kept, strict=True) if mine != theirs])

    def truncate(self, seq_id: Hashable, n_tokens: int) -> None:
        """Give back the frames beyond positions [0, n_tokens); shared ones cannot be cut off."""
        holding = self._holdings[seq_id]
        keep = frames_for(n_tokens)
        assert keep >= holding.shared, f"{n_tokens} tokens would cut into {holding.shared} shared frames"
        if keep < holding.table.n_frames:
            for first, count in holding.table.extents(keep, holding.table.n_frames):
                self._pool.free(first, count)
            holding.table.truncate(keep)

    def releasable(self, seq_id: Hashable) -> int:
        """Frames that `release` would make available."""
        holding = self._holdings[seq_id]
        return holding.table.n_frames - holding.shared + self._tree.would_idle(holding.node)

    def release(self, seq_id: Hashable) -> None:
        """Close the table: shared frames lose a reference, private ones are free."""
        self.truncate(seq_id, self._holdings[seq_id].shared * FRAME)
        self._tree.release(self._holdings.pop(seq_id).node)

    def table(self, seq_id: Hashable) -> PageTable:
        """The sequence's page table; only this manager writes it."""
        return self._holdings[seq_id].table

    def check_integrity(self) -> None:
        """Find every frame's owner from scratch and compare with the counters; raises AssertionError. O(pool)."""
        self._pool.check_integrity()
        self._tree.check_integrity([holding.node for holding in self._holdings.values()])
        owner: dict[int, str] = {}

        def claim(frames: Sequence[int], who: str) -> None:
            for frame in frames:
                assert 0 <= frame < self.n_frames, f"frame {frame} of {who} is outside the pool"
                assert frame not in owner, f"frame {frame} belongs to {owner.get(frame)} and to {who}"
                owner[frame] = who

        for first, count in self._pool.free_pages():
            claim(range(first, first + count), "free")
        for _, _, node in self._tree.nodes():
            claim(node.frames, "held" if node.uses else "cached")
        for seq_id, holding in self._holdings.items():
            table = holding.table
            assert table.frames(0, holding.shared) == self._tree.path(holding.node), f"{seq_id!r} strays from its path in the tree"
            claim(table.frames(holding.shared, table.n_frames), "held")
        assert len(owner) == self.n_frames, f"{self.n_frames - len(owner)} frames have no owner"
        found = list(owner.values())
        by_owner = KVCounts(self.n_frames, found.count("free"), found.count("cached"), found.count("held"), self.n_evictions)
        assert by_owner == self.counts(), f"{by_owner} found, {self.counts()} counted"

    def _make_free(self, n_frames: int) -> None:
        missing = n_frames - self._pool.n_free
        if missing > 0:
            self._free_frames(self._tree.evict(missing))
            self.n_evictions += missing

    def _free_frames(self, frames: Sequence[int]) -> None:
        for first, count in runs(frames):
            self._pool.free(first, count)


def _reusable(tokens: Sequence[int]) -> Sequence[int]:
    return tokens[: max(0, len(tokens) - 1) // FRAME * FRAME]
