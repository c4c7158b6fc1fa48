from __future__ import annotations

import json

import pytest
import router

from tokenmill.cluster.strategies import STRATEGIES


def test_every_strategy_is_measured_beside_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    router.main(["--workers", "5", "--requests", "50", "--decisions", "20", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(STRATEGIES) < set(found["decision_us"])
    assert all(0 < timed["median"] <= timed["p99"] for timed in found["decision_us"].values())
    assert found["limit_us"] == 100
    router.main(["--workers", "5", "--requests", "50", "--decisions", "20"])
    printed = capsys.readouterr().out
    assert all(f"\n{strategy} " in printed for strategy in STRATEGIES)
