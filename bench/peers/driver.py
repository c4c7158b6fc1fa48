"""The orchestrator's side of the protocol: one engine in a process of its own, asked one thing at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.measure.server import end_with_parent


class DriverFailed(Exception):
    """The engine answered with an error, died, or took too long. The text is for the report."""


class Driver:
    """A running driver. It is stopped by a signal while another is measured, so that a waiting engine takes no processor time.

    log: where its standard error goes.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=lambda: end_with_parent(signal.SIGKILL),  # even while it is stopped
            )

    def ask(self, do: str, timeout: float, **given: Any) -> Any:
        """The answer to one request. Raises `DriverFailed`; after a time-out the engine is dead. timeout: seconds."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        expired = threading.Event()

        def end() -> None:
            expired.set()
            self._signal(signal.SIGKILL)

        late = threading.Timer(timeout, end)
        late.start()
        try:
            process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if not line:
            how = f"took more than {timeout:.0f} s" if expired.is_set() else f"died with status {process.wait()}"
            raise DriverFailed(f"{do}: the process {how}; its log ends with: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise DriverFailed(f"{do}: {answer['error']}")
        return answer["ok"]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process, and what it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):  # what was not yet sent is of no use now
                stream.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "nothing"
