"""A gateway and its workers, all of them real processes, as whoever strikes them sees them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from lived import Lived
from network import Host, Network
from serving import TOKENMILL, child_pids
from store_servers import free_port

from tokenmill.core.roles import Role

PATIENCE = 120.0
"""Seconds in which anything starts or ends that ever does."""


@dataclass
class Guest:
    """A worker that has joined from another host, or from this one if there is no network."""

    name: str
    role: Role
    process: subprocess.Popen[bytes]
    host: Host | None


@dataclass
class Look:
    """What the gateway says of itself. health: 200 or 503. workers: by name."""

    health: int
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)


class Place:
    """Everything that was started here has ended when `close` returns; `leftovers` says who has not."""

    def __init__(self, folder: Path, model: Path, lived: Lived, serve: Sequence[str], network: Network | None = None) -> None:
        """serve: further options of `tokenmill serve`. network: joined workers have a host each there."""
        self._here = folder / "here"  # in which all processes run, by which they are found
        self._here.mkdir()
        self._folder = folder
        self._model = str(model)
        self._serve = list(serve)
        self.lived = lived
        self.network = network
        self._port, self._door = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._secret = folder / "secret"
        self._secret.write_text(secrets.token_hex(16))
        self._gateway: subprocess.Popen[bytes] | None = None
        self.guests: dict[str, Guest] = {}
        self.expected: set[str] = set()
        """Names of the workers that are to be there when nothing happens any more."""
        self._http = self._client()

    @property
    def gateway_pid(self) -> int:
        assert self._gateway is not None
        return self._gateway.pid

    @property
    def nursery_pid(self) -> int | None:
        """Whose children are the workers of this host."""
        children = child_pids(self.gateway_pid)
        return next((pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "tm-model\n"), None)

    @property
    def door(self) -> str:
        """Where workers join."""
        host = "127.0.0.1" if self.network is None else self.network.host("gateway").address
        return f"{host}:{self._door}"

    async def open(self, *own: str, listens: bool = False) -> None:
        """Start the gateway, with workers of these names; returns when it can be asked."""
        options = ["--port", str(self._port), "--served-model-name", "m", *self._serve]
        if listens:
            options += ["--listen-workers", self.door, "--secret-file", str(self._secret)]
        self.expected |= set(own)
        self._gateway = self._start("gateway", None, [*TOKENMILL, "serve", self._model, *options])
        self._opened = (own, listens)
        assert await self.lived.until(self._answers, PATIENCE), self.said("gateway")

    async def reopen(self) -> None:
        """Kill the gateway and start it again."""
        assert self._gateway is not None
        self._gateway.kill()
        self._gateway.wait()
        own, listens = self._opened
        self.expected = {*own, *self.guests}
        await self.open(*own, listens=listens)

    def join(self, name: str, role: Role, *options: str) -> None:
        """Start a worker that joins, in the place of one of this name that has ended."""
        host = None if self.network is None else self.network.host(name)
        command = [*TOKENMILL, "worker", self._model, "--join", self.door, "--secret-file", str(self._secret), "--served-model-name", "m"]
        command += ["--role", role.value, "--name", name, *options]
        self.guests[name] = Guest(name, role, self._start(name, host, command), host)
        self.expected.add(name)

    async def part(self, name: str, number: signal.Signals) -> int:
        """Have one that has joined end, by a signal. Returns its status."""
        guest = self.guests.pop(name)
        self.expected.discard(name)
        guest.process.send_signal(number)
        assert await self.lived.until(self._ended(guest.process), PATIENCE), f"{name} does not end:\n{self.said(name)}"
        return guest.process.wait()

    async def close(self) -> int:
        """End the gateway in order, then whoever has joined. Returns the gateway's status."""
        assert self._gateway is not None
        self._gateway.terminate()
        assert await self.lived.until(self._ended(self._gateway), PATIENCE), f"the gateway does not end:\n{self.said('gateway')}"
        for name in list(self.guests):
            await self.part(name, signal.SIGTERM)
        await self._http.aclose()
        return self._gateway.wait()

    def kill(self) -> None:
        """Everything at once, at the end of a test that has failed."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self._gateway, *(guest.process for guest in self.guests.values())):
            if process is not None:
                process.wait()

    def pids(self) -> list[int]:
        """Of all processes that were started here and their children, whoever their parent is now; no zombies."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "cwd").readlink() == self._here and condition(int(entry.name)) != "gone":
                    found.append(int(entry.name))
        return found

    async def look(self) -> Look:
        """Raises `httpx.HTTPError` if the gateway does not answer."""
        health = await self._http.get("/health")
        workers = (await self._http.get("/v1/workers")).json()["data"]
        return Look(health.status_code, {worker["name"]: worker for worker in workers})

    async def hang_up(self) -> None:
        """Have no connection to the gateway."""
        await self._http.aclose()
        self._http = self._client()

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=None)

    async def metrics(self) -> str:
        return (await self._http.get("/metrics")).text

    async def tell(self, what: str, name: str) -> httpx.Response:
        """`migrate` or `remove` a worker."""
        return await self._http.post(f"/v1/workers/{what}", json={"name": name})

    def said(self, name: str) -> str:
        """Its log, and those of its workers."""
        return self._log(name).read_text(errors="replace")

    def logs(self) -> dict[str, str]:
        return {path.stem: path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log"))}

    async def _answers(self) -> bool:
        assert self._gateway is not None
        assert self._gateway.poll() is None, self.said("gateway")
        with contextlib.suppress(httpx.TransportError):
            (own, listens), health = self._opened, (await self._http.get("/health")).json()["status"]
            return health == "ok" or (listens and not own)
        return False

    @staticmethod
    def _ended(process: subprocess.Popen[bytes]) -> Any:
        async def ended() -> bool:
            return process.poll() is not None

        return ended

    def _start(self, name: str, host: Host | None, command: list[str]) -> subprocess.Popen[bytes]:
        # An engine that is idle then looks for the owner of every frame, and ends if one has none.
        environment = os.environ | {"TOKENMILL_CHECK": "1"}
        command = command if host is None else host.command(*command)
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                command, cwd=self._here, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def condition(pid: int) -> str:
    """`running`, `stopped` or `gone`."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return {"T": "stopped", "Z": "gone", "X": "gone"}.get(state, "running")


def descriptors(pid: int) -> dict[str, int]:
    """How many of each kind a process has open."""
    found: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kind = str(entry.readlink()).partition(":")[0]
            found[kind] = found.get(kind, 0) + 1
    return found
