"""Settings of a KV store, as callers write them."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError


def config(**store: Any) -> EngineConfig:
    return EngineConfig.from_settings(model="m", kv_store_config=store)


def test_there_is_none_unless_it_is_asked_for() -> None:
    assert EngineConfig.from_settings(model="m").kv_store_config is None
    assert EngineConfig.from_settings(model="m", kv_store_config=None).kv_store_config is None


def test_a_server_a_folder_or_both_will_do() -> None:
    for store in ({"url": "embedded"}, {"folder": "/f"}, {"url": "valkey://h", "folder": "/f", "folder_gb": 2, "ttl": 60}):
        assert config(**store).kv_store_config is not None


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ({}, "no server and no folder"),
        ({"ttl": 60, "folder": "/f"}, "ttl is for a server"),
        ({"url": "valkey://h", "memory_gb": 2}, "memory_gb is for url embedded"),
        ({"url": "embedded", "folder_gb": 2}, "folder_gb is for a folder"),
        ({"url": "embedded", "memory_gb": 0}, "memory_gb is 0, but must be between"),
        ({"url": "embedded", "ttl": 0}, "ttl is 0, but must be between 1"),
        ({"url": "embedded", "time": 3}, "unknown setting 'kv_store_config.time'"),
        ({"url": 3}, "kv_store_config.url is 3"),
    ],
)
def test_what_cannot_be_right_is_refused(store: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        config(**store)


def test_it_needs_prefix_sharing() -> None:
    with pytest.raises(ConfigError, match="a KV store needs prefix sharing"):
        EngineConfig.from_settings(model="m", kv_store_config={"folder": "/f"}, block_manager_config={"enable_prefix_sharing": False})
