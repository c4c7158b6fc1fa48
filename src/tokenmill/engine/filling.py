"""Blocks of positions that steps have filled, under names that hold beyond this engine (core/blocks.py), for who keeps them elsewhere."""

from __future__ import annotations

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
    """Looks at every step, until it is asked what there is. What a sequence found in the prefix cache is not told, nor what it computes
    when it has not seen everything, as others may not have that."""

    def __init__(self, kv: KVManager, fingerprint: str) -> None:
        self._kv = kv
        self._fingerprint = fingerprint
        self._progress: dict[Sequence, _Progress] = {}
        self._blocks: list[Block] = []
        self._tokens = 0
        self._seconds = 0.0

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
            if whole > progress.told:
                self._tell(sequence, progress, whole)
        prompts = sum(work.n_tokens for work in step if work.n_tokens > 1)
        if prompts:
            self._tokens += prompts
            self._seconds += seconds

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        self._progress.pop(sequence, None)

    def take(self) -> list[Block]:
        """What has been filled since it was last asked. The frames hold it until the next step begins."""
        blocks, self._blocks = self._blocks, []
        return blocks

    def pace(self) -> tuple[int, float]:
        """Prompt tokens that were computed since it was last asked, and the seconds that these steps took."""
        pace = self._tokens, self._seconds
        self._tokens, self._seconds = 0, 0.0
        return pace

    def _tell(self, sequence: Sequence, progress: _Progress, whole: int) -> None:
        hasher, tables = progress.hasher, self._kv.tables(sequence.id)
        hasher.feed(sequence.token_ids[len(hasher.hashes) * BLOCK : whole * BLOCK])
        for number in range(progress.told, whole):
            frames = tuple(tuple(table.frames(number * FRAMES, (number + 1) * FRAMES)) for table in tables)
            parent = hasher.hashes[number - 1] if number else None
            self._blocks.append(Block(hasher.hashes[number], parent, sequence.cache_salt, frames))
        progress.told = whole
