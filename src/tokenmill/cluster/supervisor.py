"""Keeps one engine process running: loads it, watches it, starts it again when it ends or stops moving."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable

import msgspec

from tokenmill.cluster.process import WorkerProcess, describe_exit
from tokenmill.core.clock import Clock, MonotonicClock
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import EngineDied, TokenmillError, Unavailable
from tokenmill.core.messages import EngineInfo, Stats
from tokenmill.worker.client import EngineClient

log = logging.getLogger(__name__)


class State(enum.StrEnum):
    """`DOWN`: between the end of one process and the readiness of the next."""

    LOADING = "loading"
    READY = "ready"
    DOWN = "down"
    DRAINING = "draining"


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When to start again, and when to give up. Times in seconds."""

    first_delay: float = 0.02
    """Short, as a new process takes little longer to be ready."""
    longest_delay: float = 30.0
    healthy_after: float = 10.0
    """A process that lived this long makes the next delay `first_delay` again."""
    load_attempts: int = 8
    """Failed loads in a row after which a restart is given up. The first load of all has a single attempt."""
    ask_every: float = 5.0
    """How often the engine is asked for its counters, which is how a hang is seen."""
    stalled_after: float = 60.0
    """Silence after which the engine no longer counts as advancing, for steps of up to 512 prompt tokens."""
    killed_after: float = 600.0
    """Silence after which it counts as hung and is killed, be it loading. Far longer: on a busy machine a step of a large model takes
    minutes, and killing it would only begin it again."""

    def delay(self, failures: int) -> float:
        """The wait before the start that follows `failures` ends in a row."""
        return min(self.first_delay * 2.0 ** max(0, min(failures - 1, 30)), self.longest_delay)

    def for_chunks_of(self, chunk_size: int) -> RestartPolicy:
        """The policy for longer steps, which may be silent for longer."""
        longer = max(1.0, chunk_size / 512)
        return msgspec.structs.replace(self, stalled_after=self.stalled_after * longer, killed_after=self.killed_after * longer)


class Supervisor:
    """One engine process, kept alive from `start` to `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        start: Callable[[], Awaitable[WorkerProcess]],
        *,
        name: str = "engine",
        on_ready: Callable[[EngineInfo, EngineClient], None] | None = None,
        policy: RestartPolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        """start: gives a process that is still to load its engine, such as `Nursery.spawn`. name: in the log. on_ready: told of each
        process that has loaded its engine."""
        self.name = name
        self._on_ready = on_ready
        self._config = config
        self._start = start
        self._policy = (policy or RestartPolicy()).for_chunks_of(config.chunk)
        self._clock = clock or MonotonicClock()
        self._worker: WorkerProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._state = State.LOADING
        self._reason = "the model is loading: try again shortly"
        self._info: EngineInfo | None = None
        self.restarts = 0
        """Times that an engine process was replaced."""
        self.last_stats: Stats | None = None
        """The counters last heard."""

    @property
    def state(self) -> State:
        return self._state

    @property
    def info(self) -> EngineInfo:
        """Of the current or latest engine. Raises `Unavailable` before the first one is loaded."""
        if self._info is None:
            raise Unavailable(self._reason)
        return self._info

    @property
    def client(self) -> EngineClient:
        """The engine to send to. Raises `Unavailable` saying why there is none."""
        if self._state is not State.READY or self._worker is None:
            raise Unavailable(self._reason)
        return self._worker.client

    @property
    def advancing(self) -> bool:
        """Whether the engine is there and has said something lately."""
        return self._state is State.READY and self._silence() < self._policy.stalled_after

    async def start(self) -> EngineInfo:
        """Load the first engine and keep one running from here on. Raises what made the load fail; it is not tried again."""
        worker = await self._load()
        assert self._info is not None
        self._watch = asyncio.create_task(self._keep_alive(worker), name="supervisor")
        return self._info

    @property
    def failure(self) -> TokenmillError | None:
        """Why the engine could not be started again, if it is given up."""
        if self._watch is None or not self._watch.done() or self._watch.cancelled():
            return None
        error = self._watch.exception()
        if error is not None and not isinstance(error, TokenmillError):
            raise error
        return error

    def begin_drain(self) -> None:
        """Take no new requests; those in flight go on. A process that ends from here on is the last one."""
        self._become(State.DRAINING, "the server is shutting down and takes no new requests: use another one, or wait for its restart")

    async def stop(self, timeout: float) -> None:
        """Give the engine `timeout` seconds to finish what it has, then kill it. No process is left when this returns."""
        self.begin_drain()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            worker.client.drain()
            async with asyncio.timeout(timeout):
                await worker.client.wait_ended()
        except TimeoutError:
            log.warning("the time to finish is over, but %s has work: it is killed", self.name)
        finally:
            worker.kill()
            await worker.wait()

    def kill(self) -> None:
        """End the engine process now, from any context; for a second signal."""
        if self._worker is not None:
            self._worker.kill()

    def _silence(self) -> float:
        assert self._worker is not None
        return self._clock.now() - self._worker.client.last_heard

    def _become(self, state: State, reason: str = "") -> None:
        # A drain is final: a process that ends meanwhile does not bring the server back.
        if self._state is not State.DRAINING:
            self._state = state
            self._reason = reason

    async def _load(self) -> WorkerProcess:
        worker = self._worker = await self._start()
        try:
            async with asyncio.timeout(self._policy.killed_after):
                self._info = await worker.load(self._config)
        except TimeoutError:
            await self._give_up(worker)
            raise Unavailable(f"the process of {self.name} was not ready within {self._policy.killed_after:.0f} s") from None
        except BaseException:
            await self._give_up(worker)
            raise
        self._become(State.READY)
        if self._on_ready is not None:
            self._on_ready(self._info, worker.client)
        return worker

    async def _give_up(self, worker: WorkerProcess) -> None:
        self._worker = None
        worker.kill()
        await worker.wait()

    async def _keep_alive(self, worker: WorkerProcess) -> None:
        failures = 0
        while True:
            started = self._clock.now()
            await self._until_end(worker)
            self._become(State.DOWN, "the engine is down and being restarted: try again shortly")
            worker.kill()
            log.error("the process of %s %s", self.name, describe_exit(await worker.wait()))
            if self._state is State.DRAINING:
                return
            if self._clock.now() - started >= self._policy.healthy_after:
                failures = 0
            failures += 1
            worker = await self._reload(failures)
            self.restarts += 1
            log.warning("%s is ready again", self.name)

    async def _until_end(self, worker: WorkerProcess) -> None:
        """Return when the connection has ended or the engine has been silent for too long."""
        while not worker.client.ended:
            asking = asyncio.create_task(self._ask(worker.client))
            try:
                async with asyncio.timeout(self._policy.ask_every):
                    await worker.client.wait_ended()
            except TimeoutError:
                if self._silence() > self._policy.killed_after:
                    log.error("%s has said nothing for %.0f s: it is killed", self.name, self._silence())
                    return
            finally:
                asking.cancel()

    async def _ask(self, client: EngineClient) -> None:
        with contextlib.suppress(EngineDied):
            self.last_stats = await client.stats()

    async def _reload(self, failures: int) -> WorkerProcess:
        for attempt in range(1, self._policy.load_attempts + 1):
            delay = self._policy.delay(failures + attempt - 1)
            log.warning("%s is started again in %.2f s", self.name, delay)
            await asyncio.sleep(delay)
            try:
                return await self._load()
            except TokenmillError as error:
                log.error("%s could not be started (attempt %d of %d): %s", self.name, attempt, self._policy.load_attempts, error)
                last = error
        raise last
