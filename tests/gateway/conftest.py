from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import serving


@pytest.fixture(scope="module")
def parrot() -> Iterator[serving.Served]:
    """A server that answers with what it was told."""
    with serving.scripted() as served:
        yield served


@pytest.fixture
def http(parrot: serving.Served) -> Iterator[httpx.Client]:
    with parrot.http() as client:
        yield client
