"""Workers as tests run them: a connector with its options, another process, and this one."""

from __future__ import annotations

import os
import secrets
import signal
import ssl
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from fake_pools import U8, Numbers
from peer_process import Command, Setup

from tokenmill.kernels.frames import KVMemory
from tokenmill.transfer import names
from tokenmill.transfer.connector import Options, Side
from tokenmill.transfer.reader import Reader

FINGERPRINT = "f" * 64
SECRET = b"sixteen bytes or more"
PATIENCE = 600.0
"""Seconds before a peer counts as lost, where it is not to be lost: tests may be stopped for long on a busy machine."""


def over(*wires: str) -> pytest.MarkDecorator:
    """For a test of these connectors only."""
    return pytest.mark.parametrize("wire", wires, indirect=True)


@dataclass
class Wire:
    """A connector as a test runs it. certificate: of TLS, with its key."""

    connector: names.Connector
    certificate: Path | None = None

    @property
    def secret(self) -> bytes:
        return b"" if self.connector == "shm" else SECRET

    def reader_options(self) -> Options:
        options = Options(timeout=PATIENCE, secret=self.secret)
        if self.certificate is None:
            return options
        return replace(options, reader_tls=ssl.create_default_context(cafile=str(self.certificate)))

    def door_options(self) -> Options:
        options = Options(timeout=PATIENCE, secret=self.secret)
        if self.certificate is None:
            return options
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        return replace(options, door_tls=context)


@dataclass
class PeerProcess:
    setup: Setup
    content: U8
    process: subprocess.Popen[str]
    address: str = ""

    def tell(self, do: str, nonce: bytes = b"", frames: Numbers | None = None) -> str:
        command = Command(do, nonce, [part.tolist() for part in frames or []])
        return self._line(msgspec.json.encode(command).decode())

    def grant(self, frames: Numbers, nonce: bytes | None = None) -> tuple[bytes, bytes]:
        """The nonce, and the checksum."""
        nonce = nonce or secrets.token_bytes(16)
        self.tell("grant", nonce, frames)
        return nonce, bytes.fromhex(self.tell("checksum", frames=frames))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # until it has stopped

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self, text: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(text, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the peer has died"
        return answer.strip()


@dataclass
class Us:
    """This worker: its pool, what was in it, and its reader."""

    side: Side
    content: U8
    reader: Reader

    @property
    def memory(self) -> KVMemory:
        return self.side.memory
