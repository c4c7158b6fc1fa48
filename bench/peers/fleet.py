"""The engines that are running for one model: all of them if memory holds them, else the least recently used make room."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driver import Driver
from engines import ENVIRONMENTS, Engine

LOAD_SECONDS = 1800.0
ASK_SECONDS = 900.0


@dataclass
class Fleet:
    """model: a GGUF file. At most one engine runs at a time; the others are stopped, with their memory."""

    model: Path
    threads: int
    versions: dict[str, str] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    """Seconds from the start of an engine's process until its model is loaded; what is converted before does not count."""
    _alive: dict[str, Driver] = field(default_factory=dict)

    def ask(self, engine: Engine, do: str, **given: Any) -> Any:
        """Ask one engine, starting it if it is not running. Raises `DriverFailed`; the engine is then closed."""
        with self._running(engine) as driver:
            return driver.ask(do, ASK_SECONDS, **given)

    def close(self) -> None:
        while self._alive:
            self._alive.popitem()[1].close()

    @contextmanager
    def _running(self, engine: Engine) -> Iterator[Driver]:
        driver = self._alive.pop(engine.name, None)
        if driver is None:
            self._make_room()
            driver = Driver(engine.command, engine.environment, engine.folder, ENVIRONMENTS / f"{engine.name}.log")
            loaded = False
        else:
            driver.resume()
            loaded = True
        try:
            if not loaded:
                self._load(engine, driver)
            yield driver
        except BaseException:
            driver.close()
            raise
        driver.pause()
        self._alive[engine.name] = driver  # the last is the most recently used

    def _load(self, engine: Engine, driver: Driver) -> None:
        started = time.monotonic()
        self.versions[engine.name] = driver.ask("version", LOAD_SECONDS)
        spent = time.monotonic() - started
        converted = engine.home / "models" / self.model.stem
        converted.mkdir(parents=True, exist_ok=True)
        path = driver.ask("prepare", LOAD_SECONDS, model=str(self.model), folder=str(converted))
        started = time.monotonic()
        driver.ask("load", LOAD_SECONDS, model=path, threads=self.threads)
        self.ready[engine.name] = spent + time.monotonic() - started

    def _make_room(self) -> None:
        """Close engines until a further one should fit: its weights in 16 bits are about three times the file."""
        need = 3 * self.model.stat().st_size + (3 << 30)
        while self._alive and available_memory() < need:
            oldest = next(iter(self._alive))
            print(f"  memory is short: {oldest} is closed, and started again when its turn comes", flush=True)
            self._alive.pop(oldest).close()


def available_memory() -> int:
    """Bytes that new processes can use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not tell MemAvailable: this comparison needs Linux")
