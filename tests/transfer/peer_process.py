"""A worker of its own that opens a door: `python peer_process.py`. The first line in is a `Setup`, each further one a `Command`; a line
answers each.

Faults: `die` kills the process in the middle of the first read, `revoke` takes back the grants there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import msgspec
import numpy as np
from fake_pools import pool, random_bytes

from tokenmill.core.connectors import parse_connector
from tokenmill.kernels.frames import Frames, Geometry
from tokenmill.transfer import names
from tokenmill.transfer.connector import Options, Side
from tokenmill.transfer.door import SocketDoor
from tokenmill.transfer.grants import Grants


class Setup(msgspec.Struct):
    connector: str
    geometry: Geometry
    seed: int
    boot: str
    fingerprint: str
    options: dict[str, Any] = {}
    secret: bytes = b""
    tls: str | None = None
    fault: str | None = None


class Command(msgspec.Struct):
    """do: grant, revoke, checksum, corrupt (a byte of each frame)."""

    do: str
    nonce: bytes = b""
    frames: list[list[int]] = []


def main() -> None:
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    options = Options(secret=setup.secret, **setup.options)
    if setup.tls is not None:
        options = with_tls(options, setup.tls)
    memory = pool(setup.geometry, random_bytes(setup.geometry, setup.seed))
    door = names.open_door(parse_connector(setup.connector), Side(memory, setup.boot, setup.fingerprint), options)
    if setup.fault is not None:
        break_down(setup.fault, door)
    answer(door.address)
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        frames = [np.array(numbers, np.int32) for numbers in command.frames]
        if command.do == "grant":
            door.grant(command.nonce, frames)
        elif command.do == "revoke":
            door.revoke(command.nonce)
        elif command.do == "corrupt":
            for numbers in frames:
                memory.data[numbers * setup.geometry.piece_bytes] ^= 1
        answer(memory.frames(frames).digest().hex() if command.do == "checksum" else "done")


def answer(text: str) -> None:
    print(text, flush=True)


def with_tls(options: Options, certificate: str) -> Options:
    import ssl
    from dataclasses import replace

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return replace(options, door_tls=context)


def break_down(fault: str, door: Any) -> None:
    """Where a door has found a grant and, if it sends frames itself, has sent some."""
    assert isinstance(door, SocketDoor)
    find, gather = Grants.find, Frames.gather

    def strike() -> None:
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        for nonce in list(door._grants._by_nonce):
            door.revoke(nonce)

    def finds(self: Grants, *asked: Any) -> Any:
        found = find(self, *asked)
        if not door.address.startswith("tcp:"):
            strike()
        return found

    def gathers(self: Frames, out: Any = None, start: int = 0) -> Any:
        if start > 0 and threading.current_thread() is not threading.main_thread():
            strike()
        return gather(self, out, start)

    Grants.find = finds  # type: ignore[method-assign]
    if door.address.startswith("tcp:"):
        Frames.gather = gathers  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
