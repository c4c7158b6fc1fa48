"""Workers of other hosts: who of them is let in, and how they are parted from."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection

from tokenmill.cluster.dispatcher import Dispatcher, Member
from tokenmill.cluster.registry import Worker
from tokenmill.cluster.supervisor import RestartPolicy
from tokenmill.core.clock import MonotonicClock
from tokenmill.core.errors import ConfigError
from tokenmill.core.joining import Join, JoinRefused
from tokenmill.core.messages import EngineInfo
from tokenmill.core.roles import Role
from tokenmill.worker.client import EngineClient

log = logging.getLogger(__name__)


class Guests:
    """Those of one model, which is asked for before, beside workers of this host, whose names are `taken`. join: has the dispatcher give
    one work. policy: how long one may be silent."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        taken: Collection[str],
        join: Callable[[str, Role, EngineInfo, EngineClient], None],
        policy: RestartPolicy | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._taken = taken
        self._join = join
        self._policy = policy or RestartPolicy()
        self._clock = MonotonicClock()
        self.closing = False

    @property
    def members(self) -> list[Member]:
        return [member for member in self._dispatcher.members if member.process.name not in self._taken]

    def admit(self, join: Join) -> None:
        """A worker takes the place of its own earlier connection, and of another that does not move. Raises `JoinRefused`."""
        name, info = join.name, join.info
        if self.closing:
            raise JoinRefused("closing", "the gateway is about to end")
        try:
            Worker.of(name, join.role, info)
        except ConfigError as error:
            raise JoinRefused("worker", error.message) from None
        if name in self._taken:
            raise JoinRefused("name", f"{name} is a worker of the gateway's own host: give this one another --name")
        before = self._dispatcher.member(name)
        if before is not None and before.info.boot != info.boot and self._dispatcher.is_moving(name):
            raise JoinRefused("name", f"a living worker is called {name}: give this one another --name, or end the other one")
        others = [member for member in self._dispatcher.members if member is not before]
        if others and info.fingerprint != others[0].info.fingerprint:
            raise JoinRefused(
                "fingerprint",
                f"it has fingerprint {info.fingerprint[:16]}…, but worker {others[0].process.name} {others[0].info.fingerprint[:16]}…, so "
                "that the same seed would give other answers: model file, KV format, calibration and kernels (TOKENMILL_KERNELS) must be "
                "the same",
            )
        if before is not None:
            before.client.cut()

    def welcome(self, join: Join, client: EngineClient) -> None:
        log.info("worker %s (%s, %d threads) has joined", join.name, join.role, join.info.threads)
        self._join(join.name, join.role, join.info, client)

    async def watch(self) -> None:
        """Cut off who hangs, for ever: its host answers for it, so that the connection would never end, and requests that nobody else can
        take would wait with it. If it goes on it comes back."""
        while True:
            await asyncio.sleep(self._policy.ask_every)
            for member in self.members:
                silence = self._clock.now() - member.client.last_heard
                if silence > self._policy.for_chunks_of(member.info.chunk_size).killed_after:
                    log.error("worker %s has said nothing for %.0f s: it is cut off", member.process.name, silence)
                    member.client.cut()

    async def part(self, timeout: float) -> None:
        """Let all finish what they have within so many seconds, and end their connections."""
        self.closing = True

        async def part(client: EngineClient) -> None:
            client.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await client.wait_ended()
            await client.close()

        await asyncio.gather(*(part(member.client) for member in self.members))
