"""Whether what a gateway says of itself and its workers is true, soon enough."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from lived import Lived
from place import Look, Place, condition

WITHIN = 10.0
"""Seconds in which the gateway finds out; what docs/routing.md promises."""

_SLACK = 2.0
"""Seconds that asking and looking take."""

_EVERY = 0.2

_ANSWERING = ("decode", "mixed")
_AILING = {"suspect": "ailing", "unhealthy": "ailing"}


class _Since:
    """Since when something is as it is, as far as it was looked at."""

    def __init__(self, lived: Lived) -> None:
        self._lived = lived
        self._known: dict[object, tuple[object, float]] = {}

    def seconds(self, what: object, value: object) -> float:
        before = self._known.get(what)
        if before is None or before[0] != value:
            self._known[what] = before = value, self._lived.now()
        return self._lived.now() - before[1]

    def forget(self) -> None:
        self._known.clear()


class Watch:
    """Compares, for as long as `run` does. lies: what was wrong for too long.

    unreachable: by name, until when a worker may well be out of reach: there was a cut, and what was sent meanwhile is sent again only
    after as long as the cut was.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._told = _Since(place.lived)
        self._real = _Since(place.lived)
        self._pids: set[int] = set()
        self.unreachable: dict[str, float] = {}
        self.lies: list[str] = []
        self.looks = 0

    async def run(self) -> None:
        feeling = asyncio.create_task(self._feel())
        try:
            while True:
                await self._place.lived.sleep(_EVERY)
                await self._ask()
        finally:
            feeling.cancel()
            await asyncio.gather(feeling, return_exceptions=True)

    async def _feel(self) -> None:
        """Look at the processes themselves, often enough to miss nothing that lasts."""
        while True:
            for pid in (self._place.gateway_pid, *self._pids):
                self._real.seconds(pid, condition(pid))
            await asyncio.sleep(_EVERY / 2)

    async def _ask(self) -> None:
        gateway = self._place.gateway_pid
        if self._has_run(gateway) < WITHIN:  # it cannot know yet, and cannot tell
            self._told.forget()
        try:
            look = await self._place.lived.within(WITHIN, self._place.look())
        except TimeoutError:
            if self._has_run(gateway) > WITHIN:
                self.lies.append(f"[{self._place.lived.now():.1f}] the gateway has not answered for {WITHIN:.0f} s")
            return
        except (httpx.HTTPError, KeyError):  # it has just been killed, or was stopped for long
            return
        self._pids = {worker["pid"] for worker in look.workers.values() if worker["pid"]}
        if gateway == self._place.gateway_pid and self._has_run(gateway) > WITHIN:
            self.looks += 1
            self._compare(look)

    def _has_run(self, pid: int) -> float:
        """For so many seconds, without a pause."""
        state = condition(pid)
        seconds = self._real.seconds(pid, state)
        return seconds if state == "running" else 0.0

    def _compare(self, look: Look) -> None:
        limit = WITHIN + _SLACK
        well, ill = [], []
        for name, worker in look.workers.items():
            told = self._told.seconds(name, _AILING.get(worker["state"], worker["state"]))
            really, lasts = self._reality(name, worker)
            if min(told, lasts) > limit:
                if worker["state"] == "healthy" and really in ("stopped", "gone"):
                    self._lie(f"{name} ({worker['pid']}) has been {really} for {lasts:.1f} s, but is told to be healthy")
                if worker["state"] in _AILING and really == "running":
                    self._lie(f"{name} ({worker['pid']}) has run for {lasts:.1f} s, but is told to be {worker['state']}")
            if worker["role"] in _ANSWERING:
                well.append(really == "running" and lasts > limit and worker["state"] != "draining")
                ill.append(really in ("stopped", "gone", "none") and lasts > limit)
        told = self._told.seconds("health", look.health)
        if any(well) and told > limit and look.health != 200:
            self._lie(f"/health has said {look.health} for {told:.1f} s, but there is who can answer: {look.workers}")
        if all(ill) and told > limit and look.health == 200:
            self._lie(f"/health says 200, but for {limit:.0f} s there has been nobody who could answer: {look.workers}")

    def _reality(self, name: str, worker: dict[str, Any]) -> tuple[str, float]:
        """What a worker is, and for how long."""
        now, pid = self._place.lived.now(), worker["pid"]
        if now < self.unreachable.get(name, 0):
            return "out of reach", 0.0
        if pid is None:
            return "none", self._told.seconds(("none", name), None)
        self._told.seconds(("none", name), pid)
        really = condition(pid)
        return really, min(self._real.seconds(pid, really), now - self.unreachable.get(name, 0))

    def _lie(self, what: str) -> None:
        self.lies.append(f"[{self._place.lived.now():.1f}] {what}")
        self._told.forget()
