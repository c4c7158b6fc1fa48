"""What the KV manager tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCounts:
    """Frames by owner, those of them that several sequences reference, and frames evicted since the start."""

    total: int
    free: int
    cached: int
    held: int
    shared: int
    evictions: int


@dataclass(frozen=True, slots=True)
class KVUse:
    """How frames are used. by_page: frames in use, by the tokens of the page that they were handed out in. unfilled: positions of
    held frames that nothing is computed for, over all groups. dropped: frames that budgets made sequences give up, since the start."""

    by_page: dict[int, int]
    unfilled: int
    dropped: int
