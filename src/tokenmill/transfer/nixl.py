"""Connector `nixl`, for networks whose hardware reads another host's memory: NVIDIA's transfer library, over UCX.

The control connection is that of `tcp`, secret, TLS and all. Frames do not go over it: the reader's library reads the door's registered
pool, into a block of its own and not into the reader's pool, because a transfer that was given up may still write to its target much later.
Whoever was once welcomed could read, and write, the pool by its own library: among workers of one owner only.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ConfigError
from tokenmill.kernels.frames import Checksum, Frames, Geometry, KVMemory
from tokenmill.kernels.ops import Int32s
from tokenmill.transfer import network
from tokenmill.transfer.connector import Connect, Door, Link, Lost, Options, Refused, Side
from tokenmill.transfer.door import SocketDoor
from tokenmill.transfer.grants import Grant
from tokenmill.transfer.handshake import introduce
from tokenmill.transfer.link import SocketLink, opening
from tokenmill.transfer.listener import Session
from tokenmill.transfer.stream import Ended, Stream

STAGE = 4 << 20
"""Bytes that are read at a time."""

_SPIN, _PAUSE = 200e-6, 50e-6
"""Seconds: how long to look without a pause whether something is done, and then how long between two looks."""

LIBRARIES = ("nixl_cu12", "nixl_cu13")


class _Pool(msgspec.Struct, frozen=True):
    """What a reader's library needs. base: address of the pool in the door's process."""

    metadata: bytes
    base: int


class _Done(msgspec.Struct, frozen=True):
    """The reader has all of a read, or has given it up."""


_POOLS = msgspec.msgpack.Decoder(_Pool)
_DONE = msgspec.msgpack.Decoder(_Done)


def open_door(side: Side, options: Options) -> Door:
    """Raises `ConfigError` if the library is not installed, or as `tcp` does."""
    secret = options.require_secret()
    agent = _Agent()
    agent.register(side.memory.data)
    sock, address = network.listen_at(options)
    return SocketDoor(side, _Delivery(options, agent, side.memory), sock, f"nixl:{address}", secret, options.timeout)


def connector(side: Side, options: Options) -> Connect:
    agents: list[_Agent] = []
    lock = threading.Lock()

    def agent() -> _Agent:
        """The reader's, made when it is first needed: that takes half a second."""
        with lock:
            if not agents:
                agents.append(_Agent())
            return agents[0]

    def connect(address: str) -> Link:
        secret = network.secret_of_reader(options)
        try:
            ours = agent()
        except ConfigError as error:
            raise Refused("address", error.message) from None
        with opening(f"nixl:{address}", lambda: network.reach(address, options)) as stream:
            peer = introduce(stream, side, secret)
            return SocketLink(f"nixl:{address}", stream, peer, _Receipt(ours, stream.receive(_POOLS), peer.geometry, options.timeout))

    return connect


class _Agent:
    """The library's end in this process, for one thread at a time. Raises `ConfigError` if it is not installed.

    It has no thread of its own: that would burn a CPU for as long as the agent lives. So who waits for a transfer has to call `progress`,
    on both sides.
    """

    def __init__(self) -> None:
        library = _library()
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.name = f"tokenmill-{secrets.token_hex(8)}"
        self.lock = threading.Lock()
        self._agent = library.nixl_agent(self.name, config)

    def register(self, data: npt.NDArray[np.uint8]) -> Any:
        return self._agent.register_memory([(data.ctypes.data, data.nbytes, 0, "")], "DRAM")

    def deregister(self, registered: Any) -> None:
        self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        found = self._agent.add_remote_agent(metadata)
        return found.decode() if isinstance(found, bytes) else str(found)

    def part(self, name: str) -> None:
        self._agent.remove_remote_agent(name)

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def prepare(self, name: str, theirs: npt.NDArray[np.uint64], ours: npt.NDArray[np.uint64]) -> Any:
        """A read that has not begun. theirs, ours: [n, 3] of (address, bytes, 0)."""
        descriptors = [self._agent.get_xfer_descs(part, "DRAM") for part in (ours, theirs)]
        return self._agent.initialize_xfer("READ", *descriptors, name)

    def begin(self, handle: Any) -> str:
        return str(self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Raises if the read is still under way, which it may be after a failure too."""
        self._agent.release_xfer_handle(handle)


class _Delivery:
    """Where the pool is, once; then nothing but progress for as long as a reader reads."""

    def __init__(self, options: Options, agent: _Agent, memory: KVMemory) -> None:
        self._options = options
        self._agent = agent
        self._memory = memory

    def accept(self, session: Session) -> None:
        network.accept(session, self._options)

    def open(self, stream: Stream) -> None:
        with self._agent.lock:
            metadata = self._agent.metadata()
        stream.send(_Pool(metadata, self._memory.data.ctypes.data))

    def deliver(self, stream: Stream, frames: Frames, grant: Grant) -> None:
        for _ in _looks():
            with self._agent.lock:
                self._agent.progress()
            if not stream.quiet():
                stream.receive(_DONE)
                return


class _Receipt:
    def __init__(self, agent: _Agent, pool: _Pool, geometry: Geometry, timeout: float) -> None:
        self._agent = agent
        self._base = pool.base
        self._geometry = geometry
        self._timeout = timeout
        self._block = np.empty(max(STAGE, geometry.piece_bytes), np.uint8)
        self._given_up = False
        with self._agent.lock, _failures():
            self._registered = agent.register(self._block)
            self._peer = agent.meet(pool.metadata)

    def take(self, stream: Stream, theirs: Sequence[Int32s], mine: Frames, check: Checksum) -> None:
        at = 0
        for places in _batches(self._geometry, theirs, len(self._block)):
            count = int(places[:, 1].sum())
            self._fill(stream, places)
            mine.scatter(self._block[:count], at)
            at += count
            check.advance(at)
        stream.send(_Done())

    def close(self) -> None:
        """A block that something may still be written to is never used again, nor freed."""
        if self._given_up:
            _ABANDONED.append(self._block)
            return
        with self._agent.lock, contextlib.suppress(Exception):
            self._agent.part(self._peer)
            self._agent.deregister(self._registered)

    def _fill(self, stream: Stream, places: npt.NDArray[np.uint64]) -> None:
        """Read (offset in the peer's pool, bytes, 0) one after another into the block."""
        ours = places.copy()
        ours[:, 0] = self._block.ctypes.data + np.cumsum(places[:, 1]) - places[:, 1]
        theirs = places.copy()
        theirs[:, 0] += np.uint64(self._base)
        deadline = time.monotonic() + self._timeout
        with _failures():
            with self._agent.lock:
                handle = self._agent.prepare(self._peer, theirs, ours)
                self._given_up = True  # until the library lets go of it
            try:
                with self._agent.lock:
                    state = self._agent.begin(handle)
                looks = _looks()
                while state == "PROC":
                    next(looks)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{len(places)} pieces were not read within {self._timeout:g} s")
                    if not stream.quiet():
                        raise Ended("the stream ended while its pool was read")
                    with self._agent.lock:
                        state = self._agent.state(handle)
                if state != "DONE":
                    raise Ended(f"a transfer ended in state {state}")
            finally:
                with self._agent.lock:
                    self._agent.release(handle)
                self._given_up = False


_ABANDONED: list[npt.NDArray[np.uint8]] = []
"""Blocks of transfers whose end was not seen: rare, and each small."""


def _batches(geometry: Geometry, numbers: Sequence[Int32s], most: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Runs of memory that the stream of these frames consists of (native/include/frames.h), as uint64 [n, 3] of (offset in the pool, bytes,
    0), in lists of up to `most` bytes."""
    runs, sizes = [], []
    longest = most // geometry.piece_bytes
    for slots, frames in zip(geometry.slots, numbers, strict=True):
        frames = np.asarray(frames, np.int64)
        index = np.arange(len(frames))
        first = index[(np.diff(frames, prepend=-2) != 1)]
        length = np.diff(np.append(first, len(frames)))
        cuts = [np.arange(a, a + n, longest) for a, n in zip(first.tolist(), length.tolist(), strict=True)]
        first = np.concatenate(cuts) if cuts else first
        length = np.diff(np.append(first, len(frames)))
        slot = np.arange(slots)[:, None] * geometry.slot_stride
        runs.append((slot + frames[first] * geometry.piece_bytes).ravel())
        sizes.append(np.tile(length * geometry.piece_bytes, slots))
    places = np.zeros((sum(map(len, runs)), 3), np.uint64)
    places[:, 0], places[:, 1] = np.concatenate(runs), np.concatenate(sizes)
    ends = np.cumsum(places[:, 1])
    begin = 0
    while begin < len(places):
        before = int(ends[begin - 1]) if begin else 0
        stop = int(np.searchsorted(ends, before + most, side="right"))
        yield places[begin:stop]
        begin = stop


def _looks() -> Iterator[None]:
    """At first one after another, then with pauses."""
    started = time.monotonic()
    while True:
        yield
        if time.monotonic() - started > _SPIN:
            time.sleep(_PAUSE)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """What the library says when a peer is gone, which it has many exceptions for."""
    try:
        yield
    except (Lost, Refused, OSError):
        raise
    except Exception as error:
        raise Lost("ended", f"nixl: {error or type(error).__name__}") from None


def _library() -> Any:
    for name in LIBRARIES:
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every agent on standard output
        return library
    raise ConfigError(
        "connector nixl is not installed: pip install --no-deps nixl-cu12 (without --no-deps it brings gigabytes), or choose tcp",
        param="connector",
    )
