"""`tokenmill` whose engine verifies every draft in full, whatever it costs: `eager.py serve …`. It is its own worker: `eager.py FD`."""

from __future__ import annotations

import functools
import sys


def work() -> None:
    from tokenmill.speculate import draft_model, speculator
    from tokenmill.speculate.balance import Balance
    from tokenmill.speculate.checks import Checks
    from tokenmill.speculate.proposer import Best, Worth
    from tokenmill.worker.main import main

    speculator.choose_lengths = lambda odds, *_: [len(each) for each in odds]  # type: ignore[assignment]
    draft_model.RETURN = 0.0
    Worth.floor = lambda *_: 0.0  # type: ignore[method-assign]
    Worth.best = lambda worth, odds, drafting=0.0, drafts=1: Best(float(len(odds)), 1.0 + len(odds))  # type: ignore[method-assign]
    Balance.rests = lambda _: False  # type: ignore[method-assign]
    Checks.due = False  # type: ignore[method-assign, assignment]
    main()


def command() -> None:
    from tokenmill.cli.main import main
    from tokenmill.cluster import local

    local.Cluster = functools.partial(local.Cluster, command=(sys.executable, "-P", __file__))  # type: ignore[assignment, misc]
    main()


if __name__ == "__main__":
    (work if sys.argv[1].isdigit() else command)()
