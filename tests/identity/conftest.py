from __future__ import annotations

from pathlib import Path

import pytest
from request_pool import RequestPool


@pytest.fixture(scope="package")
def pool(smollm2_path: Path) -> RequestPool:
    """SmolLM2's requests, of which each is run alone once for all tests here."""
    return RequestPool(smollm2_path, seed=1, n_short=40, n_talkative=6, n_long=5)
