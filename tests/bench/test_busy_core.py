from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import serving

BENCH = Path(__file__).parents[2] / "bench"
KILLED = """
import os, signal
from busy_core import busy_core
with busy_core() as process:
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_that_burns_a_core_ends_with_a_benchmark_that_is_killed() -> None:
    found = subprocess.run([sys.executable, "-c", KILLED], cwd=BENCH, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert found.returncode == -signal.SIGKILL
    status = Path(f"/proc/{found.stdout.strip()}/stat")

    def ended() -> bool:
        try:
            return status.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    serving.until(ended)
