"""The KV store that the workers of a host share, before any of them is started."""

from __future__ import annotations

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.embedded import EmbeddedPolicy, EmbeddedServer


def with_store(config: EngineConfig) -> tuple[EngineConfig, EmbeddedServer | None]:
    """The settings with the address of a server in place of `embedded`, and that server, which is still to be started.

    Raises `ConfigError` for a URL that cannot be read, and if the server's package is not installed.
    """
    store = config.kv_store_config
    if store is None or store.url is None:
        return config, None
    if not store.is_embedded:
        parse_address(store.url)
        return config, None
    server = EmbeddedServer.prepare(EmbeddedPolicy(memory=int(store.memory_gb * 2**30)))
    own = msgspec.structs.replace(store, url=server.url, memory_gb=type(store)(url=server.url).memory_gb)
    return msgspec.structs.replace(config, kv_store_config=own), server
