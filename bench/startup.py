"""How long a command line and an import take: figure, bound and ratio.

Each is a new process, timed from outside; the bare interpreter is the floor.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BOUND = 0.25
COMMAND = [sys.executable, "-P", "-c", "from tokenmill.cli.main import main; main()"]
CASES = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "tokenmill --help": [*COMMAND, "--help"],
    "tokenmill --version": [*COMMAND, "--version"],
    "import tokenmill": [sys.executable, "-c", "import tokenmill"],
    "import tokenmill.gateway.app": [sys.executable, "-c", "import tokenmill.gateway.app"],
}


def median_seconds(command: list[str], runs: int) -> float:
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=9)
    runs = parser.parse_args().runs
    print(f"{'':30} {'median s':>9} {'bound s':>8} {'ratio':>6}")
    for name, command in CASES.items():
        figure = median_seconds(command, runs)
        print(f"{name:30} {figure:9.3f} {BOUND:8.2f} {figure / BOUND:6.2f}")


if __name__ == "__main__":
    main()
