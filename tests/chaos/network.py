"""A network of hosts on one machine: a network namespace each, whose packets all go through this process, which can hold them back, lose
them, or cut the way."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 16000
"""Bytes of a packet: few of them carry megabytes, since each costs this process a turn."""


class Unavailable(Exception):
    """There can be no such network here, and why."""


class Host(NamedTuple):
    """namespace: None is the one of this process. device: its only way to others."""

    name: str
    address: str
    namespace: str | None
    device: str

    def command(self, *command: str) -> list[str]:
        """One that runs a command there."""
        return list(command) if self.namespace is None else ["ip", "netns", "exec", self.namespace, *command]


class Weather(NamedTuple):
    """What packets meet. delay, jitter: seconds. loss: the share of them that nobody ever sees; 1 is a cut."""

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0


FAIR = Weather()
CUT = Weather(loss=1.0)


@dataclass
class _Port:
    host: Host
    tun: int
    weather: dict[str, Weather] = field(default_factory=dict)
    """By the other host's name."""


class Network:
    """The first host, `gateway`, is this process's own namespace."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self._ports: dict[str, _Port] = {}
        self._by_address: dict[bytes, _Port] = {}
        self._lock = threading.Lock()
        self._awake, self._wake = os.pipe()
        self._running = threading.Thread(target=self._run, name="network", daemon=True)
        self._running.start()
        try:
            self.host("gateway")
        except BaseException:
            self.close()
            raise

    def host(self, name: str) -> Host:
        """A new one, or the one that has this name. Raises `Unavailable`."""
        if name in self._ports:
            return self._ports[name].host
        number = len(self._ports) + 1
        device = f"tm{os.getpid()}-{number}"[:15]
        namespace = None if name == "gateway" else f"tm{os.getpid()}-{name}"
        host = Host(name, f"{self._subnet}.{number}", namespace, device)
        tun = _open_tun(device)
        port = _Port(host, tun)
        with self._lock:
            self._ports[name] = port
            self._by_address[bytes(map(int, host.address.split(".")))] = port
        at: tuple[str, ...] = ()
        if namespace is not None:
            _ip("netns", "add", namespace)
            _ip("link", "set", device, "netns", namespace)
            at = ("-n", namespace)
            _ip(*at, "link", "set", "lo", "up")
        _ip(*at, "address", "add", f"{host.address}/24", "dev", device)
        _ip(*at, "link", "set", device, "mtu", str(_MTU), "up")
        os.write(self._wake, b"n")
        return host

    def weather(self, one: str, other: str, weather: Weather) -> None:
        """In both directions, from now on."""
        for here, there in ((one, other), (other, one)):
            self._ports[here].weather[there] = weather

    def calm(self) -> None:
        """All ways are open and quick."""
        for port in self._ports.values():
            port.weather.clear()

    def close(self) -> None:
        os.close(self._wake)
        self._running.join()
        os.close(self._awake)
        for port in self._ports.values():
            os.close(port.tun)  # which ends the device
            if port.host.namespace is not None:
                with contextlib.suppress(Unavailable):
                    _ip("netns", "delete", port.host.namespace)

    def _run(self) -> None:
        """Carry packets until `close`."""
        late: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while True:
            with self._lock:
                ports = {port.tun: port for port in self._ports.values()}
            wait = None if not late else max(0.0, late[0][0] - time.monotonic())
            ready, _, _ = select.select([self._awake, *ports], [], [], wait)
            for tun in ready:
                if tun != self._awake:
                    self._carry(ports[tun], late, numbers)
                elif not os.read(tun, 100):
                    return
            while late and late[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(late)
                _put(tun, packet)

    def _carry(self, source: _Port, late: list[tuple[float, int, int, bytes]], numbers: Iterator[int]) -> None:
        packet = os.read(source.tun, 2**16)
        target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if target is None:
            return
        weather = source.weather.get(target.host.name, FAIR)
        if self._rng.random() < weather.loss:
            return
        wait = weather.delay + self._rng.uniform(0, weather.jitter)
        if wait:
            heapq.heappush(late, (time.monotonic() + wait, next(numbers), target.tun, packet))
        else:
            _put(target.tun, packet)


def _put(tun: int, packet: bytes) -> None:
    # A device that is down takes nothing, and one that is full loses it.
    with contextlib.suppress(OSError):
        os.write(tun, packet)


def _open_tun(device: str) -> int:
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR)
    except OSError as error:
        raise Unavailable(f"/dev/net/tun cannot be opened: {error.strerror}") from None
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        os.close(tun)
        raise Unavailable(f"a network device cannot be made, for which one must be root: {error.strerror}") from None
    return tun


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable("there is no command ip (package iproute2)") from None
    if done.returncode:
        raise Unavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
