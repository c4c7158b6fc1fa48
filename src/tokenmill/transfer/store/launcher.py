"""Becomes another program that ends when the thread that started it does, however that happens.

    python -I -S launcher.py PARENT COMMAND [ARGUMENT...]

PARENT is the process number of whoever starts this. It runs by itself, with nothing but the standard library, before the other program
takes its place. (The same call in the child of a fork would run Python code where other threads may hold its locks.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    # It may have ended before the kernel was asked to tell.
    if os.getppid() == parent:
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
