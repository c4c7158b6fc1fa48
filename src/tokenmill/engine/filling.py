"""Blocks of positions that steps have filled, under names that hold beyond this engine (core/blocks.py): for a store, which keeps their
bytes, and for a router, which sends prompts to where they begin."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import NamedTuple

from tokenmill.core.blocks import BLOCK, BlockHasher
from tokenmill.core.types import FRAME
from tokenmill.kv.manager import KVManager
from tokenmill.scheduler.scheduler import Step
from tokenmill.scheduler.sequence import Sequence

FRAMES = BLOCK // FRAME
"""Frames of each KV group in a block."""


class Block(NamedTuple):
    """`BLOCK` positions that are computed. key, parent: its own name and that of the block before it, if there is one. frames: of each KV
    group, `FRAMES` numbers, -1 where it no longer has them, as they have fallen out of its window since an earlier step."""

    key: bytes
    parent: bytes | None
    salt: str
    frames: tuple[tuple[int, ...], ...]


class _Progress:
    """Of one sequence. told: blocks that need not be told any more."""

    __slots__ = ("hasher", "told")

    def __init__(self, hasher: BlockHasher, told: int) -> None:
        self.hasher = hasher
        self.told = told


class Filling:
    """Looks at every step, until it is asked what there is.

    A store is told of what was computed: not of what a sequence found in the prefix cache, nor of what it computes when it has not seen
    everything, as others may not have that. A router is told of what the cache has, found or computed, and of what it gives up.
    """

    def __init__(self, kv: KVManager, fingerprint: str, *, store: bool, router: bool) -> None:
        self._kv = kv
        self._fingerprint = fingerprint
        self._tells_store = store
        self._progress: dict[Sequence, _Progress] = {}
        self._blocks: list[Block] = []
        self._tokens = 0
        self._seconds = 0.0
        self._lead = kv.lead if router else None
        self._names: dict[int, bytes] = {}  # of blocks, by the last frame of the leading group, which goes first
        self._chains: list[list[bytes]] = []
        self._evicted: list[bytes] = []
        if self._lead is not None:
            kv.on_eviction = self._forget_frames

    def stepped(self, step: Step, seconds: float) -> None:
        """The step is computed, and about to be committed: windows still have all that its rows looked at. It took `seconds`. What it found
        right of drafts is told after the next one. O(its sequences and new blocks)."""
        for work in step:
            sequence = work.sequence
            if not sequence.running:
                continue
            progress = self._progress.get(sequence)
            if progress is None:
                hasher = BlockHasher(sequence.cache_salt, self._fingerprint)
                progress = self._progress[sequence] = _Progress(hasher, work.start // BLOCK)
            whole = min(work.start + work.n_tokens, sequence.shareable) // BLOCK
            if whole > len(progress.hasher.hashes):
                self._name(sequence, progress.hasher, whole)
            if self._tells_store and whole > progress.told:
                self._tell(sequence, progress, whole)
        prompts = sum(work.n_tokens for work in step if work.n_tokens > 1)
        if prompts:
            self._tokens += prompts
            self._seconds += seconds

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        progress = self._progress.pop(sequence, None)
        if progress is not None and self._lead is not None and progress.hasher.hashes:
            self._chains.append(progress.hasher.hashes)

    def take(self) -> list[Block]:
        """What has been filled since it was last asked. The frames hold it until the next step begins."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def pace(self) -> tuple[int, float]:
        """Prompt tokens that were computed since it was last asked, and the seconds that these steps took."""
        pace = self._tokens, self._seconds
        self._tokens, self._seconds = 0, 0.0
        return pace

    def news(self) -> tuple[list[list[bytes]], list[bytes]]:
        """For a router, since it was last asked: the names of all blocks of each sequence that is over, and those that the cache has given
        up (of one that two sequences computed at the same time perhaps too early: that costs time alone)."""
        news = self._chains, self._evicted
        self._chains, self._evicted = [], []
        return news

    def _name(self, sequence: Sequence, hasher: BlockHasher, whole: int) -> None:
        named = len(hasher.hashes)
        hasher.feed(sequence.token_ids[named * BLOCK : whole * BLOCK])
        if self._lead is not None:
            frames = self._kv.tables(sequence.id)[self._lead].frames(named * FRAMES, whole * FRAMES)
            self._names.update(zip(frames[FRAMES - 1 :: FRAMES], hasher.hashes[named:], strict=True))

    def _tell(self, sequence: Sequence, progress: _Progress, whole: int) -> None:
        hashes, tables = progress.hasher.hashes, self._kv.tables(sequence.id)
        for number in range(progress.told, whole):
            frames = tuple(tuple(table.frames(number * FRAMES, (number + 1) * FRAMES)) for table in tables)
            parent = hashes[number - 1] if number else None
            self._blocks.append(Block(hashes[number], parent, sequence.cache_salt, frames))
        progress.told = whole

    def _forget_frames(self, frames: Ordered[int]) -> None:
        names = self._names
        self._evicted += [names.pop(frame) for frame in frames if frame in names]
