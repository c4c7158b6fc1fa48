"""Who holds which frames: the page tables of all running sequences.

For one sequence with `c` computed tokens, of whose frames the first `s` of each group are shared:

| positions              | frames are       | owner                 | given back by                                        |
|------------------------|------------------|-----------------------|------------------------------------------------------|
| [0, 8s)                | full, immutable  | the prefix cache; the | `release` drops the reference: the frames are then   |
|                        |                  | sequence references   | cached, and evicted when others need them            |
| [8s, c)                | being filled     | the sequence          | `commit` hands full ones to the cache (or frees them |
|                        |                  |                       | where it has that prefix); `release` frees           |
| [c, 8 * table frames)  | reserved, unread | the sequence          | `truncate` and `release` free                        |

In groups with a window, and in streaming ones once the sequence is sparse, `commit` also gives back what no later row looks at: the
table has a hole there. `sparsify` gives back more, and from then on nothing of the sequence enters the cache.

Free (in the buddy allocator) + cached (in the prefix cache, unreferenced) + held (referenced there, or private to a sequence) = total,
always. The free and the cached ones are the store's (kv/frame_store.py), which also takes them from there and back; the manager
decides which and how many. A sequence writes only to positions >= c, hence only into private frames. Nothing here moves or copies a
frame's bytes. *Promised* frames are free or cached ones that a sequence may still take on its way to its goal: nobody else gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from tokenmill.core.config import BlockManagerConfig
from tokenmill.core.types import FRAME, Streaming
from tokenmill.kv.budget import WEIGHED, Ladder, Rung, SparsePolicy, lightest
from tokenmill.kv.counts import KVCounts, KVUse
from tokenmill.kv.footprint import Footprint, frames_for
from tokenmill.kv.frame_store import FrameStore
from tokenmill.kv.groups import KVGroup, Whole, Window, check_groups
from tokenmill.kv.holding import Holding
from tokenmill.kv.prefix_tree import PrefixHit
from tokenmill.kv.table import HOLE, PageTable, runs

LADDERS = 256
"""Ladders that are kept for the next sequence with the same budget. Budgets come from clients, and any number of them may differ."""


class KVManager:
    """The holdings of the running sequences, over one store of frames.

    groups: the model's KV groups, whose frames all come from the pool. policy: what sequences with a budget do at its points.
    Sequence ids are any hashable values, unique among the sequences that hold something.
    """

    def __init__(self, groups: Sequence[KVGroup], n_frames: int, config: BlockManagerConfig, policy: SparsePolicy | None = None) -> None:
        self.groups = check_groups(groups)
        self.n_frames = n_frames
        self._policy = policy or SparsePolicy()
        self._footprint = Footprint.of(groups)
        self._ladders: dict[int, Ladder] = {}
        self._store = FrameStore(self.groups, self._leader(), n_frames, config)
        self._holdings: dict[Hashable, Holding] = {}
        self._promised = 0
        self._n_dropped = 0

    @property
    def n_free(self) -> int:
        return self._store.n_free

    @property
    def n_cached(self) -> int:
        return self._store.n_cached

    @property
    def n_held(self) -> int:
        return self.n_frames - self._store.available

    @property
    def n_evictions(self) -> int:
        return self._store.n_evictions

    @property
    def lead(self) -> int | None:
        """The group whose frames are the keys of the prefix tree, if there is one."""
        return self._leader()

    @property
    def on_eviction(self) -> Callable[[Sequence[int]], None] | None:
        """Is told of frames that the prefix cache has given up."""
        return self._store.on_eviction

    @on_eviction.setter
    def on_eviction(self, told: Callable[[Sequence[int]], None]) -> None:
        self._store.on_eviction = told

    @property
    def available(self) -> int:
        """Frames that a reservation can get: free ones, and cached ones by eviction, without those promised to sequences."""
        return self._store.available - self._promised

    @property
    def shares_prefixes(self) -> bool:
        return self._store.shares_prefixes

    @property
    def n_groups(self) -> int:
        return len(self.groups)

    @property
    def n_holders(self) -> int:
        """Sequences that have a table."""
        return len(self._holdings)

    def counts(self) -> KVCounts:
        return KVCounts(self.n_frames, self.n_free, self.n_cached, self.n_held, self._store.n_shared, self.n_evictions)

    def use(self) -> KVUse:
        """O(running sequences), and as `count_pages`."""
        tables = [(table, holding.computed) for holding in self._holdings.values() for table in holding.tables]
        pages = self._store.count_pages(table for table, _ in tables)
        references = sum(table.present for table, _ in tables)
        return KVUse(pages, references, sum(table.n_frames * FRAME - computed for table, computed in tables), self._n_dropped)

    def ladder(self, budget: int) -> Ladder:
        """The points of a budget of that many frames."""
        if budget not in self._ladders:
            if len(self._ladders) >= LADDERS:
                self._ladders.clear()
            self._ladders[budget] = Ladder(budget, self._policy, self._footprint)
        return self._ladders[budget]

    def match(self, tokens: Sequence[int], salt: str, limit: int | None = None) -> PrefixHit:
        """Whole frames of `tokens` that need not be computed; at least the last token always is. Changes nothing.

        limit: no more than that many tokens are found.
        """
        return self._store.match(tokens, salt, limit)

    def acquire(self, seq_id: Hashable, tokens: Sequence[int], salt: str, limit: int | None = None) -> int:
        """Open tables over what `match` finds and return how many tokens that is."""
        assert seq_id not in self._holdings, f"sequence {seq_id!r} already has a table"
        holding = self._holdings[seq_id] = self._store.open(tokens, salt, limit)
        return holding.computed

    def fresh(self, hit: PrefixHit, goal: int, chunk: int, ladder: Ladder | None = None) -> int:
        """The most frames beyond those of `hit` that a sequence holds at a time until it has `goal` tokens, at most `chunk` of them
        computed in a step."""
        frames = self._footprint.taken(hit.frames, frames_for(goal), chunk)
        if ladder is not None:
            most = min(ladder.budget, ladder.peak(goal))
            frames = min(frames, max(0, most + self._footprint.transient(chunk) - hit.held))
        return frames

    def promise(self, seq_id: Hashable, goal: int, chunk: int, ladder: Ladder | None = None) -> None:
        """Keep what `fresh` says for the sequence, until it has computed all but the last of `goal` tokens.

        The only sequence needs no more than there is: what it found in the cache nobody else holds, so it can be given back.
        """
        holding = self._holdings[seq_id]
        held = holding.present
        fresh = self.fresh(PrefixHit(holding.shared, 0, held), goal, chunk, ladder)
        assert fresh <= self.available or len(self._holdings) == 1, f"{fresh} frames are to be promised, but {self.available} are available"
        holding.promise = min(fresh, self.available)
        holding.ceiling = held + holding.promise
        holding.goal = goal
        self._promised += holding.promise

    def covered(self, seq_id: Hashable) -> int:
        """Token positions that the sequence has frames for in every group."""
        return self._holdings[seq_id].covered * FRAME

    def missing(self, seq_id: Hashable, n_tokens: int, step: int) -> int:
        """Available frames that `reserve` would take, beyond those that are promised to the sequence."""
        holding = self._holdings[seq_id]
        return max(0, sum(holding.lacks(frames_for(n_tokens), frames_for(step))) - holding.promise)

    def reserve(self, seq_id: Hashable, n_tokens: int, step: int | None = None, keep: int = 0) -> bool:
        """Make the tables cover positions [0, n_tokens), evicting cached frames where needed.

        step: groups that slide cover only [0, step), what the next step computes (None: all). keep: frames that must stay
        available; pages that reach beyond that are taken only from what is above. Returns False, with nothing changed, when there
        are not enough frames.
        """
        holding = self._holdings[seq_id]
        goal = frames_for(n_tokens)
        lacks = holding.lacks(goal, goal if step is None or step == n_tokens else frames_for(step))
        need = sum(lacks)
        available = self.available
        if need > available + holding.promise:
            return False
        spare = max(0, available - keep - max(0, need - holding.promise))
        for group, lacking in enumerate(lacks):
            if lacking:
                context = min(n_tokens, 2 * self._sight(group)) if holding.slides[group] else n_tokens
                taken = self._store.extend(holding.tables[group], lacking, spare, context)
                spare -= taken - lacking
                if holding.promise:
                    self._redeem(holding, taken)
        holding.covered = min([table.n_frames for table in holding.tables])
        return True

    def place(self, seq_id: Hashable, n_tokens: int) -> bool:
        """As `reserve`, for keys and values that are brought and not computed: groups that slide get no frames for positions that a
        row at `n_tokens` does not look at. `commit` says when they are there. After False the tables are only good for `release`."""
        holding = self._holdings[seq_id]
        self._slide(holding, n_tokens)
        for follower in self._store.followers:
            if holding.slides[follower.groups[0]] and (unseen := follower.low(n_tokens) - holding.covered) > 0:
                for group in follower.groups:
                    self._store.truncate(holding.tables[group], holding.covered)
                    holding.tables[group].append(HOLE, unseen)
        return self.reserve(seq_id, n_tokens)

    def commit(self, seq_id: Hashable, tokens: Sequence[int], computed: int) -> None:
        """Positions [0, computed) of `tokens` are in their frames: offer the newly full ones to the prefix cache, and give back what
        falls out of sight.

        Where another sequence was faster, the tables go on with that one's frames, which hold the same bytes, and their own are
        freed.
        """
        holding = self._holdings[seq_id]
        holding.computed = computed
        if computed // FRAME > holding.shared and self.shares_prefixes and not holding.sparse:
            self._store.share(holding, tokens, computed // FRAME)
        if self._store.followers:
            self._slide(holding, computed)
        if holding.ceiling and computed >= holding.goal - 1:
            self._forgo(holding)

    def sparsify(self, seq_id: Hashable, rung: Rung, weights: Sequence[int] = ()) -> None:
        """The sequence has computed `rung.point` tokens: give back what that point says.

        weights: per frame of positions, how much the last `WEIGHED` rows attended to it, if the rung weighs. Of equal frames the
        earlier goes first.
        """
        holding = self._holdings[seq_id]
        assert holding.computed == rung.point, f"{holding.computed} tokens are computed at the point {rung.point}"
        before = holding.present
        holding.sparse = True
        if rung.weighs:
            self._drop_lightest(holding, rung.drop, weights)
        else:
            holding.slides = tuple(not isinstance(group.retention, Whole) for group in self.groups)
            self._slide(holding, rung.point)
        self._n_dropped += before - holding.present

    def dropped(self, seq_id: Hashable, computed: int) -> int:
        """Positions that a sparse sequence no longer had in the group without a window that had lost most, when it had computed so
        many tokens: one that its last point has led to."""
        holding = self._holdings[seq_id]
        sliding = [follower for follower in self._store.followers if isinstance(follower.retention, Streaming)]
        lost = [follower.low(computed) - follower.sinks for follower in sliding]
        lost += [table.n_holes for table, group in zip(holding.tables, self.groups, strict=True) if isinstance(group.retention, Whole)]
        return FRAME * max(lost)

    def truncate(self, seq_id: Hashable, n_tokens: int) -> None:
        """Give back the frames beyond positions [0, n_tokens); shared ones cannot be cut off."""
        holding = self._holdings[seq_id]
        keep = frames_for(n_tokens)
        assert keep >= holding.shared, f"{n_tokens} tokens would cut into {holding.shared} shared frames"
        for table in holding.tables:
            self._store.truncate(table, keep)
        holding.covered = min(holding.covered, keep)

    def releasable(self, seq_id: Hashable) -> int:
        """Frames that `release` would make available."""
        holding = self._holdings[seq_id]
        return holding.promise + self._store.closable(holding)

    def release(self, seq_id: Hashable) -> None:
        """Close the tables: shared frames lose a reference, private ones are free."""
        holding = self._holdings.pop(seq_id)
        self._forgo(holding)
        self._store.close(holding)

    def tables(self, seq_id: Hashable) -> tuple[PageTable, ...]:
        """The sequence's page tables, one per group in the order of `groups`; only this manager writes them."""
        return self._holdings[seq_id].tables

    def check_integrity(self) -> None:
        """Find every frame's owner from scratch and compare with the counters; raises AssertionError. O(pool)."""
        free, cached, held, shared = self._store.find_owners(self._holdings)
        found = KVCounts(self.n_frames, free, cached, held, shared, self.n_evictions)
        assert found == self.counts(), f"{found} found, {self.counts()} counted"
        assert self._promised == sum(holding.promise for holding in self._holdings.values()), "the count of promised frames is wrong"
        assert self.available >= 0, f"{-self.available} frames are promised that do not exist"

    def _leader(self) -> int | None:
        """The group whose frames are the keys of the tree: one that keeps every position as long as its sequence runs."""
        if self._policy.strategy != "none":
            return None
        return next((number for number, group in enumerate(self.groups) if isinstance(group.retention, Whole)), None)

    def _redeem(self, holding: Holding, taken: int) -> None:
        """Frames that were promised have been taken."""
        kept = min(taken, holding.promise)
        holding.promise -= kept
        self._promised -= kept

    def _slide(self, holding: Holding, computed: int) -> None:
        """Give back what a row at `computed` does not look at any more."""
        for number, follower in enumerate(self._store.followers):
            if holding.slides[follower.groups[0]]:
                low = follower.low(computed)
                if (end := min(low, holding.covered)) > follower.sinks:
                    for start, stop in holding.tables[follower.groups[0]].held(follower.sinks, end):
                        self._give_up(holding, number, start, stop)

    def _sight(self, group: int) -> int:
        """Tokens that a group which slides keeps."""
        rule = self.groups[group].retention
        assert not isinstance(rule, Whole), "a group that keeps everything does not slide"
        return rule.tokens if isinstance(rule, Window) else rule.sinks + rule.recent

    def _drop_lightest(self, holding: Holding, count: int, weights: Sequence[int]) -> None:
        number = next(n for n, follower in enumerate(self._store.followers) if isinstance(follower.retention, Whole))
        table = holding.tables[self._store.followers[number].groups[0]]
        start, stop = self._policy.sinks // FRAME, (holding.computed - WEIGHED) // FRAME
        candidates = [index for begin, end in table.held(start, stop) for index in range(begin, end)]
        assert count <= len(candidates), f"{count} frames are to go, but only {len(candidates)} may"
        for first, length in runs(lightest(weights, candidates, count)):
            self._give_up(holding, number, first, first + length)

    def _give_up(self, holding: Holding, number: int, start: int, stop: int) -> None:
        """The rule's groups have a hole at [start, stop); what that makes available counts as promised as far as it still is to come."""
        gained = self._store.punch(holding, number, start, stop)
        regained = max(0, min(gained, holding.ceiling - holding.present - holding.promise))
        holding.promise += regained
        self._promised += regained

    def _forgo(self, holding: Holding) -> None:
        """What is still promised is everybody's again."""
        self._promised -= holding.promise
        holding.promise = holding.ceiling = 0
