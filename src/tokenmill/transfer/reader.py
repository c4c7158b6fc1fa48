"""The reading side: one for all peers and connectors of a worker."""

from __future__ import annotations

import contextlib
import hmac
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tokenmill.kernels.frames import Checksum, Frames, KVMemory
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer.connector import Connect, Guard, Link, Lost, Refused, Status


class Reader:
    """Copies frames of other workers into this one's pool. Links to peers are kept, and made again when they break.

    Any number of threads can read, from one peer one after the other. connects: of each connector that is known here.
    """

    def __init__(self, memory: KVMemory, connects: Mapping[str, Connect]) -> None:
        self._memory = memory
        self._connects = connects
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()
        self._closed = False

    def read(
        self,
        address: str,
        boot: str,
        nonce: bytes,
        theirs: Sequence[Sequence[int] | Int32s],
        mine: Sequence[Int32s],
        checksum: bytes,
        guard: Guard | None = None,
    ) -> Status:
        """Copy frames of the worker at `address`, which must be in its start `boot`, to where this worker wants them.

        theirs, mine: frames of each group, as many on both sides. checksum: what `Frames.digest` gave there; it is compared with that
        of the bytes that are here in the end. Blocks until all is there or something has failed, and nothing that a peer or a ticket
        says makes it raise. Nobody else may use `mine` meanwhile, or, if there is a guard, while the read is inside it; unless all went
        well they hold anything.
        """
        self.tend()
        frames = self._memory.frames(mine)
        try:
            got = self._read(address, boot, nonce, _as_many(theirs, mine), frames, guard or _Unguarded())
        except Refused as refused:
            return Status("refused", refused.reason, refused.detail)
        except Lost as lost:
            return Status("lost", lost.reason, lost.detail)
        if not hmac.compare_digest(got, checksum):
            return Status("corrupt", "checksum", f"frames of {address} have checksum {got.hex()}, but {checksum.hex()} was announced")
        return Status()

    def tend(self) -> None:
        """Let go of peers that have gone, whose pools a link may keep in memory. For the time when nothing is read."""
        with self._lock:
            places = list(self._places.items())
        for address, place in places:
            if not place.lock.acquire(blocking=False):
                continue
            with contextlib.ExitStack() as stack:
                stack.callback(place.lock.release)
                if place.link is None or place.link.ended():
                    place.drop()
                    with self._lock:
                        if self._places.get(address) is place:
                            del self._places[address]

    def close(self) -> None:
        """Break off reads under way, which are lost, and let go of all peers. Waits for nobody: who is just being reached is let go of when
        that has been done, or has failed."""
        with self._lock:
            self._closed = True
            places = list(self._places.values())
        for place in places:
            link = place.link
            if link is not None:
                link.cut()
            place.let_go()

    def _read(self, address: str, boot: str, nonce: bytes, theirs: list[Int32s], mine: Frames, guard: Guard) -> bytes:
        """Returns the checksum of what has come. Raises `Refused`, `Lost`."""
        connector, _, rest = address.partition(":")
        connect = self._connects.get(connector)
        if connect is None:
            raise Refused("address", f"{address!r} is of no connector that is known here: {', '.join(self._connects)}")
        with self._at(address) as place:
            if place.link is not None and place.link.peer.boot == boot:
                # A link that breaks may be one to a worker that has been started again since it was last used.
                with contextlib.suppress(Lost):
                    return place.fetch(nonce, theirs, mine, guard)
            place.drop()
            self._require_open()
            place.link = connect(rest)
            self._require_open()
            if place.link.peer.boot != boot:
                raise Refused("boot", f"{address} is now start {place.link.peer.boot!r} of its worker, not {boot!r}")
            return place.fetch(nonce, theirs, mine, guard)

    @contextlib.contextmanager
    def _at(self, address: str) -> Iterator[_Place]:
        while True:
            with self._lock:
                place = self._places.setdefault(address, _Place())
            try:
                with place.lock:
                    self._require_open()
                    if self._places.get(address) is place:  # or it has been tended to before the lock was had
                        yield place
                        return
            finally:
                if self._closed:
                    place.let_go()

    def _require_open(self) -> None:
        if self._closed:
            raise Lost("ended", "this worker reads no more")


class _Unguarded:
    """For frames that are the reader's until the read has ended."""

    open = True

    def __init__(self) -> None:
        self.interrupt: Callable[[], None] = lambda: None

    def __enter__(self) -> _Unguarded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _Place:
    """An address: its link, if there is one. lock: whose holder uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.link: Link | None = None

    def fetch(self, nonce: bytes, theirs: list[Int32s], mine: Frames, guard: Guard) -> bytes:
        """A link that has failed in any other way than by a refusal is dropped, since nobody knows what is still on its way."""
        assert self.link is not None
        check = Checksum(mine)
        try:
            _require_inside(theirs, self.link.peer.geometry.n_frames)
            with guard:
                guard.interrupt = self.link.cut
                if not guard.open:
                    raise Refused("nonce", "nobody waits for these frames any more")
                self.link.fetch(nonce, theirs, mine, check)
        except Refused:
            raise
        except BaseException:
            self.drop()
            raise
        return check.digest()

    def let_go(self) -> None:
        """Drop the link, unless somebody uses it."""
        if self.lock.acquire(blocking=False):
            self.drop()
            self.lock.release()

    def drop(self) -> None:
        link, self.link = self.link, None
        if link is not None:
            link.close()


def _as_many(theirs: Sequence[Any], mine: Sequence[Int32s]) -> list[Int32s]:
    """Frames as a ticket names them, if they are as many as one's own."""
    try:
        numbers: list[Int32s] = [part if isinstance(part, np.ndarray) and part.dtype == np.int32 else array("i", part) for part in theirs]
    except (OverflowError, TypeError):
        raise Refused("frames", "the peer's frames are no int32 numbers") from None
    counts, wanted = [len(part) for part in numbers], [len(part) for part in mine]
    if counts != wanted:
        raise Refused("frames", f"the peer has {counts} frames of the KV groups, but {wanted} are to be filled")
    return numbers


def _require_inside(theirs: list[Int32s], n_frames: int) -> None:
    for numbers in theirs:
        if len(numbers) and not (min(numbers) >= 0 and max(numbers) < n_frames):
            raise Refused("frames", f"frames {min(numbers)} to {max(numbers)} are not all in the peer's pool of {n_frames}")
