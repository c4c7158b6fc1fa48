"""A worker that serves a gateway on another host: found by its address, and found again whenever it has gone."""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import Unavailable
from tokenmill.core.handover import FromWorker
from tokenmill.core.joining import PASSING, VERSION, Join, JoinRefused
from tokenmill.core.messages import EngineInfo
from tokenmill.core.proof import draw
from tokenmill.core.roles import Role
from tokenmill.worker.departure import Departure
from tokenmill.worker.exchange import open_exchange
from tokenmill.worker.main import Engine, Event, Fetched, Inbox, Leave, Load, Worker, load_engine, open_stock
from tokenmill.worker.title import set_title
from tokenmill.worker.uplink import GatewayAddress, Uplink, reach

if TYPE_CHECKING:
    from tokenmill.engine.engine import Engine as RealEngine

log = logging.getLogger(__name__)

FIRST_DELAY = 0.25
LONGEST_DELAY = 5.0
"""Seconds between attempts to reach a gateway: each is about twice as long as the one before."""


def serve_gateway(
    config: EngineConfig,
    name: str,
    role: Role,
    gateway: GatewayAddress,
    patience: float,
    *,
    load: Load = load_engine,
    announce: Callable[[EngineInfo], None] = lambda info: None,
) -> None:
    """Build an engine and serve a gateway with it, until SIGINT or SIGTERM; then finish what there is, within `patience` seconds.

    To be called in the main thread of a process that has no other. announce: called whenever the gateway has welcomed the worker.
    Raises the error of a load that fails, and `Unavailable` if the gateway refuses the worker before it has ever welcomed it, for a
    reason that does not pass.
    """
    departure = Departure(patience)
    set_title(config, name)
    engine = load(config)(config)
    joined = JoinedWorker(engine, config, name, role, gateway, departure, announce)
    joined.run()
    joined.close()


class JoinedWorker:
    """One engine and, one after the other, the connections by which it serves."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        name: str,
        role: Role,
        gateway: GatewayAddress,
        departure: Departure,
        announce: Callable[[EngineInfo], None],
    ) -> None:
        self._engine = engine
        self._gateway = gateway
        self._departure = departure
        self._announce = announce
        self._uplink: Uplink | None = None
        self._inbox: Inbox | None = None
        boot, self._exchange = secrets.token_hex(16), None
        if config.kv_transfer_config is not None:
            real = cast("RealEngine", engine)
            self._exchange = open_exchange(config.kv_transfer_config, real, boot, self._send, self._post)
        self._stock = open_stock(config, engine, self._post)
        address = "" if self._exchange is None else self._exchange.address
        info = msgspec.structs.replace(engine.info, pid=os.getpid(), boot=boot, address=address)
        self._join = Join(version=VERSION, fresh=draw(), name=name, role=role, info=info)

    def run(self) -> None:
        """Until the process is asked to end."""
        failures, welcomed, told = 0, False, ""
        while not self._departure.asked:
            try:
                uplink = reach(self._gateway, self._join)
            except JoinRefused as refused:
                why = f"the gateway at {self._gateway} refuses this worker: {refused.detail}"
                if not welcomed and refused.reason not in PASSING:
                    raise Unavailable(why) from None
            except OSError as error:
                why = f"no gateway at {self._gateway}: {error}"
            else:
                failures, welcomed = 0, True
                self._announce(self._join.info)
                self._serve(uplink)
                why = f"the connection to the gateway at {self._gateway} has ended"
            failures += 1
            if self._departure.asked:
                return
            if why != told:
                log.warning("%s: it is tried again", why)
                told = why
            # Not all workers of a gateway that comes back at the same time.
            threading.Event().wait(min(FIRST_DELAY * 2.0 ** min(failures - 1, 30), LONGEST_DELAY) * random.uniform(0.5, 1.0))

    def close(self) -> None:
        for part in (self._exchange, self._stock):
            if part is not None:
                part.close()
        self._engine.close()

    def _serve(self, uplink: Uplink) -> None:
        """One connection: nothing that came by it, and nothing that is due to it, is left when this returns."""
        inbox = Inbox(uplink.sock)
        self._uplink, self._inbox = uplink, inbox
        worker = Worker(self._engine, self._send, inbox, self._exchange, self._stock)
        try:
            with self._departure.told(lambda: inbox.post(Leave())):
                worker.run()
                uplink.close(inbox.join)
            worker.abandon()
        finally:
            self._uplink = self._inbox = None

    def _send(self, message: FromWorker) -> None:
        assert self._uplink is not None, f"{type(message).__name__} for nobody"
        self._uplink.send(message)

    def _post(self, event: Event) -> None:
        inbox = self._inbox
        assert inbox is not None or isinstance(event, Fetched), "a read goes on that nobody waits for"
        if inbox is not None:
            inbox.post(event)
