"""Which frames may be read, under which nonce."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import NONCE_BYTES, Refused


class Grant:
    """Frames of each group. A reader that is being served looks at `revoked` from block to block."""

    def __init__(self, n_groups: int) -> None:
        self.frames: list[set[int]] = [set() for _ in range(n_groups)]
        self.revoked = False


class Grants:
    """The grants of one pool, for any thread."""

    def __init__(self, n_groups: int) -> None:
        self._n_groups = n_groups
        self._by_nonce: dict[bytes, Grant] = {}
        self._lock = threading.Lock()

    def grant(self, nonce: bytes, frames: Sequence[Int32s]) -> None:
        assert len(nonce) == NONCE_BYTES, f"a nonce of {len(nonce)} bytes"
        assert len(frames) == self._n_groups, f"frames of {len(frames)} KV groups, there are {self._n_groups}"
        with self._lock:
            known = self._by_nonce.setdefault(nonce, Grant(self._n_groups)).frames
            for group, numbers in zip(known, frames, strict=True):
                group.update(numbers.tolist())

    def revoke(self, nonce: bytes) -> None:
        with self._lock:
            grant = self._by_nonce.pop(nonce, None)
        if grant is not None:
            grant.revoked = True

    def find(self, nonce: bytes, frames: Sequence[npt.NDArray[np.int32]]) -> Grant:
        """The grant that covers all of `frames`. Raises `Refused`."""
        with self._lock:
            grant = self._by_nonce.get(nonce)
            if grant is None:
                raise Refused("nonce", "nothing is granted under this nonce, or not any more")
            wanted = [numbers.tolist() for numbers in frames]
            if len(wanted) != self._n_groups or not all(map(set.issuperset, grant.frames, wanted)):
                raise Refused("frames", "not all of these frames are granted under this nonce")
        return grant
