"""Computed frames of every group, found again by tokens: the prefix tree, and the companions of its keys.

The tree's runs are runs of *keys*, one per 8 positions. Where a group keeps every position for as long as its sequence runs, its frame
is the key: it is in the tree as long as anything builds on it. All other groups' frames accompany a key (kv/companions.py): they are
referenced by those sequences alone that still look at them, and are evicted one by one. Without such a *leading* group (all layers
have windows, or sequences may drop frames anywhere) keys are numbers of their own, and all frames are companions.

A hit at position p needs the keys of [0, p), and of each rule the companions that a row at p looks at. Eviction takes what has been
idle longest, whichever kind it is; a key takes its companions along, which are idle when it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tokenmill.core.types import FRAME
from tokenmill.kv.companions import Companions, Frames
from tokenmill.kv.prefix_tree import Node, PrefixHit, PrefixTree


class Rule(NamedTuple):
    """Groups whose frames are companions. groups: how many. window: frames before a position that its row looks at, None for all."""

    groups: int
    window: int | None

    def first(self, end: int) -> int:
        """The first of `end` frames of positions that the next row looks at."""
        return 0 if self.window is None else max(0, end - self.window)


class Found(NamedTuple):
    """A hit that is referenced. companions: per rule, the frames from `rule.first(len(keys))` on."""

    node: Node
    keys: list[int]
    companions: list[list[Frames]]


class PrefixCache:
    """See the module. Counts are frames of the pool."""

    def __init__(self, rules: Sequence[Rule], leads: bool) -> None:
        self._rules = tuple(rules)
        self._companions = tuple(Companions() for _ in rules)
        self._followers = tuple(zip(self._rules, self._companions, strict=True))
        self._leads = leads
        self._tree = PrefixTree()
        self._numbers = _Numbers()

    @property
    def n_idle(self) -> int:
        """Frames that `evict` can give back."""
        idle = self._tree.n_frames - self._tree.n_live if self._leads else 0
        for rule, companions in self._followers:
            idle += rule.groups * companions.n_idle
        return idle

    @property
    def n_shared(self) -> int:
        """Frames that several sequences reference."""
        shared = self._tree.n_shared if self._leads else 0
        return shared + sum(rule.groups * companions.n_shared for rule, companions in self._followers)

    def match(self, tokens: Sequence[int], salt: str) -> PrefixHit:
        """Look up whole frames of `tokens` without touching anything."""
        if not self._rules:
            return self._tree.match(tokens, salt)
        keys, live = self._tree.find(tokens, salt)
        end = self._usable(keys)
        held, idle = (end, max(0, end - live)) if self._leads else (0, 0)
        for rule, companions in self._followers:
            seen = keys[rule.first(end) : end]
            held += rule.groups * len(seen)
            idle += rule.groups * companions.idle_among(seen)
        return PrefixHit(end, idle, held)

    def acquire(self, tokens: Sequence[int], salt: str) -> Found:
        """Reference what `match` finds."""
        if not self._rules:
            return Found(*self._tree.acquire(tokens, salt), [])
        end = self._usable(self._tree.find(tokens, salt)[0])
        node, keys = self._tree.acquire(tokens[: end * FRAME], salt)
        seen = [companions.ref(keys[rule.first(end) :]) for rule, companions in self._followers]
        return Found(node, keys, seen)

    def extend(self, node: Node, tokens: Sequence[int], keys: list[int] | None, companions: list[list[Frames]]) -> Found:
        """Move the caller's reference from `node` down over `tokens`, and offer the frames that hold them.

        keys: the leading group's frames, None when there is none. companions: per rule, the other groups', or holes. Returned are those
        that the cache has for these positions, with a reference of the caller's; offered ones that are not among them stay the
        caller's, and holes stay holes.
        """
        mine = keys if keys is not None else self._numbers.take(len(companions[0]))
        end, kept = self._tree.extend(node, tokens, mine)
        if keys is None and kept != mine:
            self._numbers.give([number for number, theirs in zip(mine, kept, strict=True) if number != theirs])
        if not companions:
            return Found(end, kept, companions)
        offers = zip(self._companions, companions, strict=True)
        return Found(end, kept, [list(map(known.put, kept, offered)) for known, offered in offers])

    def advance(self) -> None:
        """What becomes idle from here on was used later than all that is idle."""
        self._tree.tick += 1

    def leave(self, rule: int, keys: Sequence[int]) -> int:
        """The caller no longer looks at the rule's frames of these keys; returns how many frames became idle."""
        return self._rules[rule].groups * self._companions[rule].unref(keys, self._tree.tick)

    def release(self, node: Node) -> None:
        """Drop a reference on keys. The caller `leave`s their companions next, so that all are idle since the same tick."""
        self._tree.release(node)

    def sole(self, rule: int, keys: Sequence[int]) -> int:
        """How many frames `leave` would make idle."""
        return self._rules[rule].groups * self._companions[rule].sole_among(keys)

    def would_idle(self, node: Node) -> int:
        """How many frames of the leading group `release` would make idle."""
        return self._tree.would_idle(node) if self._leads else 0

    def evict(self, count: int) -> list[int]:
        """Remove at least `count` idle frames, and no more than go with the last of them; returns them."""
        if not self._rules:
            return self._tree.evict(count)
        gone: list[int] = []
        while len(gone) < count:
            tick = self._tree.oldest
            aside = min((c for c in self._companions if c.n_idle), key=lambda c: c.oldest or 0, default=None)
            if aside is not None and (tick is None or (aside.oldest or 0) < tick):
                gone += aside.evict()
                continue
            (key,) = self._tree.evict(1)
            if self._leads:
                gone.append(key)
            else:
                self._numbers.give([key])
            for companions in self._companions:
                gone += companions.forget(key)
        return gone

    def _usable(self, keys: Sequence[int]) -> int:
        """The longest hit within these keys."""
        end, before = len(keys), -1
        while end != before:
            before = end
            for rule, companions in self._followers:
                end = companions.reach(keys, end, rule.window)
        return end

    def path(self, node: Node) -> list[int]:
        """The keys from position 0 to the end of `node`."""
        return self._tree.path(node)

    def frames(self, rule: int, keys: Sequence[int]) -> list[Frames]:
        """The rule's frames of these keys."""
        return self._companions[rule].frames(keys)

    def owned(self) -> Iterator[tuple[Sequence[int], bool]]:
        """Every frame that is here, in pieces, and whether somebody references it."""
        keys: set[int] = set()
        for _, _, node in self._tree.nodes():
            keys.update(node.frames)
            if self._leads:
                yield node.frames, node.uses > 0
        for companions in self._companions:
            for key, frames, refs in companions.items():
                assert key in keys, f"companions of key {key} have outlived it"
                yield frames, refs > 0

    def check_integrity(self, nodes: Sequence[Node], references: Sequence[dict[int, int]]) -> None:
        """Recompute all counts. nodes: one per reference on keys. references: per rule, how many there are on each key's companions."""
        self._tree.check_integrity(nodes)
        for (rule, companions), expected in zip(self._followers, references, strict=True):
            companions.check_integrity(expected)
            assert all(len(frames) == rule.groups for _, frames, _ in companions.items()), "a companion lacks a group's frame"
        live: dict[int, bool] = {key: node.uses > 0 for _, _, node in self._tree.nodes() for key in node.frames}
        assert len(live) == self._tree.n_frames, "a key is in the tree twice"
        for expected in references:
            assert all(live.get(key, False) for key in expected), "a companion is referenced, but its key is not"
        if not self._leads:
            self._numbers.check_integrity(live.keys())


class _Numbers:
    """Numbers for keys, each given out again once it is given back, so that they stay small."""

    def __init__(self) -> None:
        self._spare: list[int] = []
        self._next = 0

    def take(self, count: int) -> list[int]:
        again = [self._spare.pop() for _ in range(min(count, len(self._spare)))]
        fresh = range(self._next, self._next + count - len(again))
        self._next = fresh.stop
        return [*again, *fresh]

    def give(self, numbers: Sequence[int]) -> None:
        self._spare += numbers

    def check_integrity(self, in_use: Iterable[int]) -> None:
        everything = [*self._spare, *in_use]
        assert sorted(everything) == list(range(self._next)), "a key's number is lost, or given out twice"
