"""The KV store that the workers of a host share, before any of them is started."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.embedded import EmbeddedPolicy, EmbeddedServer


def with_store(configs: Sequence[EngineConfig]) -> tuple[list[EngineConfig], EmbeddedServer | None]:
    """The settings of models that share a store, with the address of a server in place of `embedded`, and that server, to be entered.

    Raises `ConfigError` for a URL that cannot be read, and if the server's package is not installed.
    """
    store = configs[0].kv_store_config
    assert all(config.kv_store_config == store for config in configs), "models of a host share a store"
    if store is None or store.url is None:
        return list(configs), None
    if not store.is_embedded:
        parse_address(store.url)
        return list(configs), None
    server = EmbeddedServer.prepare(EmbeddedPolicy(memory=int(store.memory_gb * 2**30)))
    own = msgspec.structs.replace(store, url=server.url, memory_gb=type(store)(url=server.url).memory_gb)
    return [msgspec.structs.replace(config, kv_store_config=own) for config in configs], server
