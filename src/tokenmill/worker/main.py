"""Engine processes: `python -m tokenmill.worker.main FD`.

FD is one end of a control socket (`worker/control.py`). The process loads a model and then forks a worker from itself whenever asked
(`worker/nursery.py`).

A worker has an end of a stream of its own. The first message in is the `EngineConfig`; the first one out is `EngineInfo`, or
`Failed` when the engine cannot be built. After that the process steps its engine while there is work and sleeps on the
socket while there is none. Each of these processes lives exactly as long as the other end of its socket: nobody else could use its work.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import TokenmillError
from tokenmill.core.handover import FromWorker, Release, ToWorker
from tokenmill.core.messages import Abort, Drain, EngineInfo, Failed, Generate, GetStats, Leaving, SequenceOutput, Stats, StepOutput
from tokenmill.core.types import FinishReason
from tokenmill.worker import control, wire
from tokenmill.worker.control import Loaded
from tokenmill.worker.exchange import Exchange, open_exchange
from tokenmill.worker.nursery import Nursery, ended_with
from tokenmill.worker.taking import ReadEnded
from tokenmill.worker.title import set_title

if TYPE_CHECKING:
    from tokenmill.engine.engine import Engine as RealEngine
    from tokenmill.worker.stock import Stock


class Engine(Protocol):
    """What the process asks of an engine."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def in_step(self) -> bool:
        """Whether `finish_step` has something to finish or to tell."""
        ...

    def add(self, request: Generate) -> None: ...

    def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None: ...

    def abort_all(self) -> None: ...

    def finish_step(self) -> list[SequenceOutput]: ...

    def give_way(self) -> None: ...

    def start_step(self) -> None: ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


class Fetched(msgspec.Struct, frozen=True):
    """Blocks have come from the KV store, or will not come. key: of the fetch."""

    key: Hashable


class StreamEnded(msgspec.Struct, frozen=True):
    """Nothing more comes from the gateway."""


class Leave(msgspec.Struct, frozen=True):
    """Somebody wants this worker to end."""


Event = ReadEnded | Fetched | StreamEnded | Leave
"""What the loop is told from inside the process."""


def end_process(status: int) -> None:
    """From any thread."""
    # Not sys.exit: the main thread may be inside a long step, or one that never ends.
    sys.stderr.flush()
    os._exit(status)


class Inbox:
    """Messages of one stream as they arrive, read by a thread of its own so that the end of the stream is seen during a step too.

    on_end: called in that thread when the stream has ended, with an exit status. None: its end is the last of its messages.
    """

    def __init__(self, sock: socket.socket, on_end: Callable[[int], None] | None = None) -> None:
        self._sock = sock
        self._on_end = on_end
        self._has_input = select.poll()
        self._has_input.register(sock, select.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._messages: queue.SimpleQueue[ToWorker | Event] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="inbox", daemon=True)
        self._thread.start()

    def post(self, event: Event) -> None:
        """What a thread of this process has to say."""
        self._messages.put(event)

    def join(self, seconds: float) -> None:
        """Wait for the end of the stream."""
        self._thread.join(seconds)

    def wait(self, seconds: float | None = None) -> ToWorker | Event | None:
        """The next message, however long it takes, or None after so many seconds."""
        try:
            return self._messages.get(timeout=seconds)
        except queue.Empty:
            return None

    def poll(self) -> ToWorker | Event | None:
        """The next message if there is one."""
        try:
            return self._messages.get_nowait()
        except queue.Empty:
            return None

    def _read(self) -> None:
        status = 1
        try:
            while (message := self._receive()) is not None:
                self._messages.put(self._decoder.decode(message))
            status = 0
        except OSError:
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            if self._on_end is None:
                self.post(StreamEnded())
            else:
                self._on_end(status)

    def _receive(self) -> bytes | None:
        # A thread that waits inside recv is woken also when the other end takes what it was sent, since there is room to write
        # then: once per token, and on a CPU that computes. One that waits for input alone is not.
        self._has_input.poll()
        return wire.receive(self._sock)


class Worker:
    """One engine and the stream that feeds it. send: to the gateway. exchange: with other workers, if it hands anything over. stock: of
    a KV store, if there is one."""

    def __init__(
        self,
        engine: Engine,
        send: Callable[[FromWorker], None],
        inbox: Inbox,
        exchange: Exchange | None = None,
        stock: Stock | None = None,
    ) -> None:
        self._engine = engine
        self._send = send
        self._inbox = inbox
        self._exchange = exchange
        self._stock = stock
        self._draining = False
        self._ended = False
        self._idle = True

    def run(self) -> None:
        """Serve until a drain is complete, or until the inbox says that the stream has ended."""
        while not self._ended:
            if self._engine.in_step:
                self._step()
            elif self._draining and not self._busy:
                return
            elif (message := self._inbox.wait(None if self._exchange is None else self._exchange.patience())) is not None:
                self._handle(message)
            while (message := self._inbox.poll()) is not None:
                self._handle(message)
            self._plan()

    def abandon(self) -> None:
        """After the end of the stream: end all that came by it. Returns when no frame is held for it."""
        if self._stock is not None:
            self._stock.abandon()
        if self._exchange is not None:
            self._exchange.closed()
        self._engine.abort_all()
        while self._engine.in_step or self._busy:
            if self._engine.in_step:
                self._step()
            elif self._exchange is not None and isinstance(message := self._inbox.wait(self._exchange.patience()), ReadEnded):
                self._exchange.handle(message)
            self._plan()

    def _step(self) -> None:
        outputs = self._engine.finish_step()
        if self._stock is not None:
            self._stock.stepped()
        if self._exchange is not None:
            self._exchange.stepped(outputs)
        # A step without outputs is told too: it is how the other side knows that the engine moves. Whoever it wakes gets a
        # CPU now, while no thread has work in its hands for which others would have to wait.
        self._send(StepOutput(outputs))
        self._engine.give_way()

    @property
    def _busy(self) -> bool:
        elsewhere = (self._exchange is not None and self._exchange.busy) or bool(self._stock)
        return self._engine.has_work or elsewhere

    def _plan(self) -> None:
        if self._exchange is not None:
            self._exchange.tick()
        if self._stock is not None:
            self._stock.tick()
        self._engine.start_step()
        self._idle = not self._engine.in_step
        if self._exchange is not None:
            self._exchange.planned()

    def _handle(self, message: ToWorker | Event) -> None:
        match message:
            case Generate():
                try:
                    self._engine.add(message)
                except TokenmillError as error:
                    self._send(Failed.of(error, message.request_id, message.epoch))
            case Fetched():
                assert self._stock is not None, "a fetch without a store has ended"
                self._stock.fetched(message.key)
            case Abort():
                self._engine.abort(message.request_id, message.choice, message.reason)
            case Release():
                if self._exchange is None or not self._exchange.release(message):
                    self._engine.abort(message.request_id, None, FinishReason.ABORT)
            case GetStats():
                handover = None if self._exchange is None else self._exchange.stats()
                store = None if self._stock is None else self._stock.stats()
                self._send(msgspec.structs.replace(self._engine.stats(), idle=self._idle, handover=handover, store=store))
            case Drain():
                self._draining = True
            case Leave():
                self._send(Leaving())
            case StreamEnded():
                self._ended = True
            case _:
                assert self._exchange is not None, f"{type(message).__name__} for a worker that hands nothing over"
                self._exchange.handle(message)


def open_stock(config: EngineConfig, engine: Engine, post: Callable[[Event], None]) -> Stock | None:
    """A worker's, if its settings name a store. Raises `ConfigError`."""
    if config.kv_store_config is None:
        return None
    from tokenmill.worker import stock  # native code

    return stock.open_stock(config.kv_store_config, cast("RealEngine", engine), lambda key: post(Fetched(key)))


Build = Callable[[EngineConfig], Engine]
Load = Callable[[EngineConfig], Build]
"""Loads once, in the nursery, what all workers share; what it returns builds the engine of one worker."""


def load_engine(config: EngineConfig) -> Build:
    """The real engine; imported here so that a worker of another engine never loads native code."""
    from tokenmill.engine.build import assemble
    from tokenmill.engine.shared import load_shared
    from tokenmill.kernels.native import Pool

    shared = load_shared(config)
    return lambda each: assemble(each, shared, Pool(each.threads, cpus=each.cpus))


def main(load: Load = load_engine) -> None:
    """Run a nursery over the descriptor named by the first argument, and a worker in each process that it forks."""
    # The supervisor decides when a process ends (by its socket), so that a signal to the whole group still drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Inherited as ignored, it would keep from this process how its workers end.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sock = socket.socket(fileno=_keep_one_descriptor(int(sys.argv[1])))
    # A peer that has gone is no fault of this process, and there is nobody left to tell.
    with contextlib.suppress(ConnectionError):
        sys.exit(_run(sock, load))


def _run(sock: socket.socket, load: Load) -> int:
    first = control.receive(sock)
    if first is None:
        return 0
    config = msgspec.msgpack.decode(first.data, type=EngineConfig)
    set_title(config, "model")
    try:
        with ended_with(sock):
            build = load(config)
    except TokenmillError as error:
        control.send(sock, Failed.of(error, ""))
        return 1
    control.send(sock, Loaded())
    stream = Nursery(sock).tend()
    if stream is None:
        return 0
    return _serve(stream, build)


def _serve(stream: socket.socket, build: Build) -> int:
    first = wire.receive(stream)
    if first is None:
        return 0
    config = msgspec.msgpack.decode(first, type=EngineConfig)
    set_title(config)
    inbox, boot, exchange, stock = Inbox(stream, end_process), secrets.token_hex(16), None, None

    def send(message: FromWorker) -> None:
        wire.send(stream, message)

    try:
        engine = build(config)
        if config.kv_transfer_config is not None:
            real = cast("RealEngine", engine)
            exchange = open_exchange(config.kv_transfer_config, real, boot, send, inbox.post)
        stock = open_stock(config, engine, inbox.post)
    except TokenmillError as error:
        wire.send(stream, Failed.of(error, ""))
        return 1
    address = "" if exchange is None else exchange.address
    wire.send(stream, msgspec.structs.replace(engine.info, pid=os.getpid(), boot=boot, address=address))
    Worker(engine, send, inbox, exchange, stock).run()
    for part in (exchange, stock):
        if part is not None:
            part.close()
    engine.close()
    return 0


def _keep_one_descriptor(number: int) -> int:
    """Beside standard input, output and errors: what the server has inherited is no business of its workers."""
    for other in {int(entry) for entry in os.listdir("/proc/self/fd")} - {0, 1, 2, number}:
        with contextlib.suppress(OSError):  # that by which they were listed
            os.close(other)
    return number


if __name__ == "__main__":
    main()
