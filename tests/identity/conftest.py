from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from request_pool import RequestPool

from tokenmill.models.loader import Model
from tokenmill.speculate import speculator
from tokenmill.speculate.balance import Balance
from tokenmill.speculate.checks import Checks
from tokenmill.speculate.proposer import Best, Worth


@pytest.fixture(scope="package")
def pool(smollm2_path: Path) -> RequestPool:
    """SmolLM2's requests, of which each is run alone once for all tests here."""
    return RequestPool(smollm2_path, seed=1, n_short=40, n_talkative=6, n_long=5)


@pytest.fixture
def one_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model with the weights that its file has."""
    monkeypatch.setattr(Model, "narrow", lambda model, pool: model)


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much of a draft as chance will have it, whatever it costs."""
    rng = random.Random(5)

    def chosen(odds: Sequence[Sequence[float]], *_: object) -> list[int]:
        return [rng.choice((len(each), rng.randint(0, len(each)))) for each in odds]

    monkeypatch.setattr(speculator, "choose_lengths", chosen)
    monkeypatch.setattr(Worth, "floor", lambda worth, most: 0.0)
    monkeypatch.setattr(Worth, "best", lambda worth, odds, drafting=0.0, drafts=1: Best(float(len(odds)), 1.0 + len(odds)))
    monkeypatch.setattr(Balance, "rests", lambda balance: False)
    monkeypatch.setattr(Checks, "due", False)
