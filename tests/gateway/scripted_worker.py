"""`tokenmill worker` over the scripted engine. One argument, the `Setup` as JSON."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec
import scripted_engine

from tokenmill.core.errors import TokenmillError
from tokenmill.core.roles import Role
from tokenmill.worker.join import serve_gateway
from tokenmill.worker.uplink import GatewayAddress


class Setup(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    port: int
    secret: str
    name: str = "w"
    model: str = "parrot"
    patience: float = 20.0
    script: dict[str, Any] = {}


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    config = msgspec.structs.replace(scripted_engine.config(**setup.script), served_name=setup.model)
    gateway = GatewayAddress("127.0.0.1", setup.port, setup.secret.encode())
    serve_gateway(config, setup.name, Role.MIXED, gateway, setup.patience, load=scripted_engine.load,
                  announce=lambda info: print(f"joined {info.pid} {info.boot}", flush=True))  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except TokenmillError as error:
        sys.exit(f"tokenmill: {error}")
