"""The KV pool as bytes: frames that leave one pool for another, or for a store.

What is in a frame is the business of native/include/page_format.h, in which order its bytes travel of native/include/frames.h.
"""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill import _native
from tokenmill.kernels.ops import Int32s

U8 = npt.NDArray[np.uint8]

BLOCK = 256 * 1024
"""Bytes that are worked on at a time: what was just written is still in the caches when its checksum is taken."""

CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class Geometry:
    """Where frames lie: the head's frame f in slot s begins at byte s * slot_stride + f * piece_bytes and has piece_bytes.

    slots: how many each KV group uses, always the first ones. Frames are numbered once for all groups.
    """

    slots: tuple[int, ...]
    slot_stride: int
    piece_bytes: int
    n_frames: int

    @property
    def nbytes(self) -> int:
        """Of a pool that holds it."""
        return max(self.slots) * self.slot_stride

    def fits(self, other: Geometry) -> bool:
        """Whether frames of `other` can be frames here. Where they lie may differ."""
        return (self.slots, self.piece_bytes) == (other.slots, other.piece_bytes)

    def problem(self, size: int) -> str | None:
        """Why this is no geometry of a pool of `size` bytes, if it is none: it may have come from elsewhere."""
        if not self.slots or min(self.slots) < 1:
            return f"groups have {self.slots} slots"
        if self.piece_bytes < 1 or not 1 <= self.n_frames < 2**31:
            return f"{self.n_frames} frames of {self.piece_bytes} bytes"
        if self.slot_stride < self.n_frames * self.piece_bytes:
            return f"slots are {self.slot_stride} bytes apart, but {self.n_frames} frames of {self.piece_bytes} bytes are in each"
        if self.nbytes > size:
            return f"slots take {self.nbytes} bytes, but the pool has {size}"
        return None


class KVMemory:
    """The bytes of a KV pool, one's own or a peer's.

    descriptor: of memory that other processes can map for reading, if it is such. It belongs to the pool: duplicate it to keep it.
    """

    def __init__(self, data: U8, geometry: Geometry, descriptor: int | None = None) -> None:
        """data: uint8 [bytes]; frames of a read-only array can be read alone. Raises ValueError if the geometry does not fit it."""
        if problem := geometry.problem(data.nbytes):
            raise ValueError(f"no KV pool is like this: {problem}")
        self.data = data
        self.geometry = geometry
        self.descriptor = descriptor

    @classmethod
    def reserve(cls, geometry: Geometry) -> KVMemory:
        """A pool of its own that other processes can map, apart from any tape. Zeroed."""
        memory = _native.Memory(geometry.nbytes)
        return cls(memory.data, geometry, memory.descriptor)

    @classmethod
    def mapped(cls, descriptor: int, geometry: Geometry) -> KVMemory:
        """A peer's pool, for reading. The descriptor stays the caller's; the mapping goes with the last reference to it.

        Raises ValueError for memory that its owner could shrink while it is read, which would end this process, or that is smaller
        than the geometry says; OSError if it is no such memory at all.
        """
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("a peer's KV pool is not sealed against shrinking")
        whole = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        return cls(np.frombuffer(whole, np.uint8), geometry)

    def frames(self, numbers: Sequence[Int32s]) -> Frames:
        """Frames of each group, in the order in which they travel; a group may give none.

        Raises ValueError for a frame that the pool does not have, or lists for another number of groups.
        """
        g = self.geometry
        if len(numbers) != len(g.slots):
            raise ValueError(f"frames of {len(numbers)} KV groups, but the pool has {len(g.slots)}")
        groups = [(slots, np.asarray(frames, np.int32)) for slots, frames in zip(g.slots, numbers, strict=True)]
        return Frames(_native.Frames(self.data, g.slot_stride, g.piece_bytes, g.n_frames, groups))


class Frames:
    """Frames of a pool as one stream of `nbytes` bytes: group by group, for each slot in order, for each frame in order, its piece.

    So the stream is the same for frames of any numbers in a pool of any size. Everything runs without the interpreter's lock, and
    raises IndexError for bytes beyond the stream. The pool stays as long as its frames are known.
    """

    def __init__(self, native: _native.Frames) -> None:
        self._native = native
        self.nbytes = native.nbytes

    def gather(self, out: U8 | None = None, start: int = 0) -> U8:
        """Copy the stream's bytes from `start` on into `out` (uint8 [n], contiguous), or all that follow into a new array."""
        if out is None:
            out = np.empty(max(0, self.nbytes - start), np.uint8)
        self._native.gather(start, out)
        return out

    def scatter(self, data: U8, start: int = 0) -> None:
        """Write `data` (uint8 [n], contiguous) to where the stream's bytes from `start` on lie. Raises ValueError if the pool is a
        peer's."""
        self._native.scatter(start, data)

    def copy(self, source: Frames, start: int = 0, stop: int | None = None) -> None:
        """Take the bytes [start, stop) of another pool's frames, without anything in between.

        Raises ValueError if the streams differ in length, or this pool is a peer's.
        """
        self._native.copy(source._native, start, (self.nbytes if stop is None else stop) - start)

    def digest(self) -> bytes:
        """xxh3_64 of the whole stream, `CHECKSUM_BYTES`."""
        check = Checksum(self)
        check.advance(self.nbytes)
        return check.digest()


class Checksum:
    """xxh3_64 of a stream that is being written: of its bytes in the pool, not of those that were sent."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._at = 0
        self._hash = xxhash.xxh3_64()
        self._block = np.empty(min(BLOCK, frames.nbytes), np.uint8)

    def advance(self, stop: int) -> None:
        """Take in what follows up to byte `stop`. Pieces can be small and far apart, so they are collected before they are hashed."""
        while self._at < stop:
            block = self._block[: stop - self._at]
            self._hash.update(self._frames.gather(block, self._at).data)
            self._at += len(block)

    def digest(self) -> bytes:
        return self._hash.digest()
