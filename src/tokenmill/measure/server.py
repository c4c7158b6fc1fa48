"""A `tokenmill serve` of our own, as a user would start it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from tokenmill.core.errors import Unavailable

COMMAND = (sys.executable, "-P", "-c", "from tokenmill.cli.main import main; main()", "serve")
STOP_SECONDS = 10
PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """For a child before its program starts: have it sent a signal when its parent dies, however that happens. Linux."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


class OwnServer:
    """Runs from `with` to its end on a free port; inside, `url`, `threads` and `kernels` are known."""

    def __init__(self, model: str, threads: int, cpus: str | None = None) -> None:
        self._command = [*COMMAND, model, "--port", "0", "--threads", str(threads), "--shutdown-timeout", "0"]
        if cpus is not None:
            self._command += ["--cpus", cpus]
        self.url = self.kernels = ""
        self.threads = 0

    def __enter__(self) -> OwnServer:
        """Raises `Unavailable` with the server's last words if it does not come up."""
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "TOKENMILL_API_KEY"},
            # Ctrl-C is for the benchmark, which ends the server when it has said what it knows.
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    @property
    def engine_pid(self) -> int:
        """The engine process: the only child of the server's only child, which holds the model. Linux."""
        (nursery,) = _children(self._process.pid)
        (engine,) = _children(nursery)
        return engine

    def _wait_ready(self) -> None:
        assert self._process.stdout is not None, "a pipe was asked for"
        for line in self._process.stdout:
            if match := re.match(r"ready after .*?: (\S+) ", line):
                self.url = match[1]
            if match := re.match(r"  compute +(\d+) threads?(?: on CPUs \S+)?, (\S+) kernels", line):
                self.threads, self.kernels = int(match[1]), match[2]
                return
        self._process.wait()
        self._log.seek(0)
        last = self._log.read().strip().splitlines()[-1:]
        raise Unavailable(f"the server did not start: {last[0].removeprefix('tokenmill: ') if last else 'it said nothing'}")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None, "a pipe was asked for"
        self._process.stdout.close()
        self._log.close()


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
