"""Frames that accompany the keys of the prefix tree, under one retention rule: counted, kept and evicted apart from the keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from tokenmill.kv.table import HOLE

Frames = tuple[int, ...]
"""One frame per group of the rule, all for the same positions."""


class _Entry:
    __slots__ = ("frames", "refs")

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.refs = 1


class Companions:
    """A dict from a key of the tree to its frames, with a reference count each.

    Keys name positions: splitting a run of the tree leaves keys as they are, and so all that is kept here. An entry without
    references is *idle*; idle ones stand in the order in which they became so, and go from the front, or with their key.
    n_shared: entries with more than one reference.
    """

    def __init__(self) -> None:
        self.n_shared = 0
        self._entries: dict[int, _Entry] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # key -> the tick at which it became idle, ascending

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    @property
    def n_idle(self) -> int:
        """Entries that nobody references."""
        return len(self._idle)

    @property
    def oldest(self) -> int | None:
        """The tick at which the first of the idle entries became idle."""
        return next(iter(self._idle.values()), None)

    def idle_among(self, keys: Iterable[int]) -> int:
        """How many of these entries are idle."""
        return sum(key in self._idle for key in keys)

    def sole_among(self, keys: Iterable[int]) -> int:
        """How many of these entries have a single reference."""
        return sum(self._entries[key].refs == 1 for key in keys)

    def reach(self, keys: Sequence[int], end: int, window: int | None) -> int:
        """The largest p <= end such that the last positions before p have entries: all, or those of which a row there sees any.

        keys: of the positions from 0 on. window: frames before p that are looked at, None for all.
        """
        if window is None:
            return next((at for at in range(end) if keys[at] not in self._entries), end)
        at = end
        while at > max(0, end - window):
            at -= 1
            if keys[at] not in self._entries:
                end = at
        return end

    def put(self, key: int, frames: Frames) -> Frames:
        """Take over frames with one reference, or take a reference on those that are there; returns the frames that it is on.

        Holes are let pass: who has none of these frames does not look at them."""
        if frames[0] == HOLE:
            return frames
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(frames)
            return frames
        self._ref(key, entry)
        return entry.frames

    def ref(self, keys: Iterable[int]) -> list[Frames]:
        """Take a reference on each entry."""
        found = []
        for key in keys:
            entry = self._entries[key]
            self._ref(key, entry)
            found.append(entry.frames)
        return found

    def unref(self, keys: Iterable[int], tick: int) -> int:
        """Drop a reference on each entry, at a tick not before the last one; returns how many became idle."""
        before = len(self._idle)
        for key in keys:
            entry = self._entries[key]
            entry.refs -= 1
            assert entry.refs >= 0, "a reference is dropped twice"
            if not entry.refs:
                self._idle[key] = tick
            elif entry.refs == 1:
                self.n_shared -= 1
        return len(self._idle) - before

    def evict(self) -> Frames:
        """Forget the entry that has been idle longest; returns its frames."""
        key, _ = self._idle.popitem(last=False)
        return self._entries.pop(key).frames

    def forget(self, key: int) -> Frames:
        """The key leaves the tree: its frames, if it has any here, which nobody may reference."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return ()
        del self._idle[key]
        return entry.frames

    def _ref(self, key: int, entry: _Entry) -> None:
        entry.refs += 1
        if entry.refs == 1:
            del self._idle[key]
        elif entry.refs == 2:
            self.n_shared += 1

    def frames(self, keys: Iterable[int]) -> list[Frames]:
        """The frames of each entry."""
        return [self._entries[key].frames for key in keys]

    def items(self) -> Iterable[tuple[int, Frames, int]]:
        """(key, frames, references) of every entry."""
        return ((key, entry.frames, entry.refs) for key, entry in self._entries.items())

    def check_integrity(self, references: dict[int, int]) -> None:
        """Compare every count with `references`, by key."""
        for key, entry in self._entries.items():
            assert entry.refs == references.get(key, 0), f"a companion of key {key} has a wrong reference count"
            assert (entry.refs == 0) == (key in self._idle), f"a companion of key {key} is wrongly idle or not"
        assert references.keys() <= self._entries.keys(), "a companion that was evicted is referenced"
        assert self._idle.keys() <= self._entries.keys(), "an idle companion does not exist"
        assert list(self._idle.values()) == sorted(self._idle.values()), "idle companions are out of order"
        assert self.n_shared == sum(entry.refs > 1 for entry in self._entries.values()), "the count of shared companions is wrong"
