"""A worker's part in hand-overs, between its loop, its engine, and the machines of `handover/` (docs/handover.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenmill.core.clock import MonotonicClock
from tokenmill.core.config import KVTransferConfig
from tokenmill.core.connectors import parse_connector
from tokenmill.core.handover import Cached, FromWorker, Prefill, Ready, Refused, Release, Reserve, Start, Taken
from tokenmill.core.messages import HandoverStats, SequenceOutput
from tokenmill.worker.giving import Giving
from tokenmill.worker.handover.lease import Source
from tokenmill.worker.handover.reservation import Target
from tokenmill.worker.taking import ReadEnded, Taking

if TYPE_CHECKING:
    from tokenmill.engine.engine import Engine
    from tokenmill.transfer.connector import Door
    from tokenmill.transfer.reader import Reader

log = logging.getLogger(__name__)

TEND_EVERY = 5.0
"""Seconds between looks for peers that have gone, whose pools this process would keep in memory if it read nothing any more."""

Handover = Reserve | Prefill | Ready | Taken | Refused | Start
"""What a gateway says about hand-overs; `Release` may be about a sequence that runs as well."""


class Exchange:
    """Made for one engine and used by the loop that steps it; closing it closes door and reader."""

    def __init__(
        self,
        engine: Engine,
        boot: str,
        door: Door,
        reader: Reader,
        send: Callable[[FromWorker], None],
        post: Callable[[ReadEnded], None],
    ) -> None:
        """boot: of this process. send: to the gateway. post: hands what a thread has seen to `handle`, in the loop."""
        clock, fingerprint = MonotonicClock(), engine.info.fingerprint
        assert engine.filling is not None, "the engine of a worker among others tells what it fills"
        self._engine = engine
        self._filling = engine.filling
        self._send = send
        self._door = door
        self._reader = reader
        self._giving = Giving(engine, door, Source(boot, fingerprint, door.address), send, clock)
        self._taking = Taking(engine, reader, Target(boot, fingerprint, engine.windows), send, post, clock)
        self._clock = clock
        self._tend_at = clock.now() + TEND_EVERY

    @property
    def address(self) -> str:
        """Where others read this worker's frames."""
        return self._door.address

    @property
    def busy(self) -> bool:
        """Whether others still want something of this worker, or it of them."""
        return bool(len(self._giving) or len(self._taking))

    def handle(self, message: Handover | ReadEnded) -> None:
        match message:
            case Reserve():
                self._taking.reserve(message)
            case Prefill():
                self._giving.prefill(message)
            case Ready():
                self._taking.ready(message)
            case Taken():
                self._giving.taken(message)
            case Refused():
                self._giving.refused(message)
            case Start():
                self._taking.start(message)
            case ReadEnded():
                if message.outcome != "ok" and message.nonce in self._engine.transit:
                    log.warning("frames of a prompt were not taken: %s: %s", message.outcome, message.why)
                self._taking.read_ended(message)

    def release(self, message: Release) -> bool:
        """False: nothing is held for this attempt."""
        return self._giving.release(message) | self._taking.release(message)

    def stepped(self, outputs: Sequence[SequenceOutput]) -> None:
        """To be told of every step that has finished, before its outputs are sent."""
        self._giving.stepped(outputs)
        chains, evicted = self._filling.news()
        if chains or evicted:
            self._send(Cached(chains, evicted))

    def planned(self) -> None:
        """To be told when the engine has planned a step: frames in transit may have given way to it."""
        lost = self._engine.transit.lost
        for key in lost:
            self._giving.lost(key)
        lost.clear()

    def tick(self) -> None:
        """To be called in every turn of the loop, of which there are some even if there is nothing to do: a gateway asks for counters."""
        self._giving.tick()
        self._taking.tick()
        self._taking.make_room()
        if (now := self._clock.now()) >= self._tend_at:
            self._tend_at = now + TEND_EVERY
            self._reader.tend()

    def patience(self) -> float | None:
        """Seconds after which `tick` has something to do though nothing has come; None: any time."""
        deadlines = [deadline for part in (self._giving, self._taking) if (deadline := part.deadline()) is not None]
        return max(0.0, min(deadlines) - self._clock.now()) if deadlines else None

    def closed(self) -> None:
        """The gateway is gone, and leases and reservations with it. Frames that are being read into are freed when the read has ended;
        until then this is `busy`."""
        self._giving.closed()
        self._taking.closed()

    def stats(self) -> HandoverStats:
        return HandoverStats(
            leases=len(self._giving),
            leases_ended={str(why): count for why, count in self._giving.ended.items()},
            reservations=len(self._taking),
            reads=self._taking.reads,
            read_bytes=self._taking.read_bytes,
            read_seconds=self._taking.read_seconds,
            waited_seconds=self._taking.waited_seconds,
            refusals={str(why): count for why, count in self._taking.refusals.items()},
        )

    def close(self) -> None:
        self._door.close()
        self._reader.close()


def open_exchange(
    config: KVTransferConfig, engine: Engine, boot: str, send: Callable[[FromWorker], None], post: Callable[[ReadEnded], None]
) -> Exchange:
    """A worker's exchange by the connector that its settings name. Raises `ConfigError`."""
    from tokenmill.transfer.connector import Side  # native code, which a worker that hands nothing over need not load
    from tokenmill.transfer.names import open_door, open_reader
    from tokenmill.worker.peers import connector_options

    side, options = Side(engine.memory, boot, engine.info.fingerprint), connector_options(config)
    door = open_door(parse_connector(config.connector), side, options)
    return Exchange(engine, boot, door, open_reader(side, options), send, post)
