"""Real processes for tests: a nursery, and workers of it that are gone at the end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import scripted_engine

from tokenmill.cluster.nursery import WORKER_COMMAND, Nursery
from tokenmill.cluster.process import WorkerProcess
from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import EngineInfo


class Ward:
    """A nursery and whom it has spawned here."""

    def __init__(self, config: EngineConfig, command: Sequence[str]) -> None:
        self.config = config
        self.nursery = Nursery(config, command)
        self.spawned: list[WorkerProcess] = []

    async def spawn(self) -> WorkerProcess:
        worker = await self.nursery.spawn()
        self.spawned.append(worker)
        return worker

    async def loaded(self, config: EngineConfig | None = None) -> tuple[WorkerProcess, EngineInfo]:
        """One that is ready."""
        worker = await self.spawn()
        return worker, await worker.load(config or self.config)


@contextlib.asynccontextmanager
async def open_ward(config: EngineConfig, command: Sequence[str] = WORKER_COMMAND) -> AsyncIterator[Ward]:
    ward = Ward(config, command)
    try:
        yield ward
    finally:
        for worker in ward.spawned:
            worker.kill()
            await worker.wait()
        await ward.nursery.close()


def scripted(**script: object) -> contextlib.AbstractAsyncContextManager[Ward]:
    """A ward of engines without a model."""
    return open_ward(scripted_engine.config(**script), scripted_engine.command())


def parent_of(pid: int) -> int:
    return int(status_of(pid, "PPid"))


def status_of(pid: int, field: str) -> str:
    """A line of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:"))


def descriptors_of(pid: int) -> dict[int, str]:
    """What each open descriptor is: `socket:[7]`."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that by which this process lists its own
            found[int(entry.name)] = str(entry.readlink())
    return found


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
