from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_servers import Server

from tokenmill.transfer.store.counts import Counts


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that is well, and has no password."""
    folder = tmp_path / "valkey"
    folder.mkdir()
    with Server(folder) as running:
        yield running


@pytest.fixture
def counts() -> Counts:
    return Counts()
