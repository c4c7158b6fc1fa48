"""Whether what a gateway says of itself and its workers is true, soon enough."""

from __future__ import annotations

import httpx
from lived import Lived
from place import Look, Place, condition

WITHIN = 10.0
"""Seconds in which the gateway finds out; what docs/routing.md promises."""

_SLACK = 2.0
"""Seconds that asking and looking take."""

_EVERY = 0.2

_ANSWERING = ("decode", "mixed")


class _Since:
    """Since when something is as it is."""

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
    """Compares, for as long as `run` does. lies: what was found to be wrong for too long; each once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._since = _Since(place.lived)
        self._gateway = _Since(place.lived)
        self.lies: list[str] = []
        self.looks = 0
        self.unreachable: dict[str, float] = {}
        """By name, until when a worker may well be out of reach: there was a cut, and what was sent meanwhile is sent again only after as
        long as the cut was."""

    async def run(self) -> None:
        while True:
            await self._place.lived.sleep(_EVERY)
            pid = self._place.gateway_pid
            steady = self._steady(pid)
            if steady < WITHIN:
                self._since.forget()
            try:
                look = await self._place.lived.within(WITHIN, self._place.look())
            except TimeoutError:
                if steady > WITHIN and self._steady(pid) > steady:
                    self._lie(f"the gateway has not answered for {WITHIN:.0f} s")
                continue
            except (httpx.HTTPError, KeyError):  # it has just been killed, or stopped for long
                continue
            if steady > WITHIN and self._steady(pid) > steady:
                self.looks += 1
                self._compare(look)

    def _steady(self, pid: int) -> float:
        """For how many seconds the gateway has been this process and has run; 0 if it does not."""
        state = condition(pid)
        seconds = self._gateway.seconds("gateway", (pid, state))
        return seconds if state == "running" else 0.0

    def _compare(self, look: Look) -> None:
        since, limit = self._since, WITHIN + _SLACK
        somebody, nobody = False, True
        for name, worker in look.workers.items():
            pid, state = worker.get("pid"), worker["state"]
            told = since.seconds(("told", name), {"suspect": "ailing", "unhealthy": "ailing"}.get(state, state))
            if self._place.lived.now() < self.unreachable.get(name, 0):
                since.seconds(("really", name), "out of reach")
                nobody = False
                continue
            really = "gone" if pid is None else condition(pid)
            lasts = since.seconds(("really", name), (pid, really))
            if min(told, lasts) > limit:
                if state == "healthy" and really != "running":
                    self._lie(f"{name} ({pid}) has been {really} for {lasts:.1f} s, but is told to be healthy")
                if state in ("suspect", "unhealthy") and really == "running":
                    self._lie(f"{name} ({pid}) has been running for {lasts:.1f} s, but is told to be {state}")
            if worker["role"] in _ANSWERING:
                nobody &= really != "running"
                somebody |= really == "running" and lasts > limit and state != "draining"
        told = since.seconds("health", look.health)
        if somebody and told > limit and look.health != 200:
            self._lie(f"/health has said {look.health} for {told:.1f} s, but there is who can answer: {look.workers}")
        if nobody and min(told, since.seconds("nobody", nobody)) > limit and look.health == 200:
            self._lie(f"/health says 200, but for {limit:.0f} s there has been nobody who could answer: {look.workers}")
        since.seconds("nobody", nobody)

    def _lie(self, what: str) -> None:
        self.lies.append(f"[{self._place.lived.now():.1f}] {what}")
        self._since.forget()
