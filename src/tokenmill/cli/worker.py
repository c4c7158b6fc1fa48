"""`tokenmill worker`"""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import __version__
from tokenmill.cli import options
from tokenmill.core.config import EngineConfig
from tokenmill.core.connectors import parse_connector
from tokenmill.core.errors import ConfigError
from tokenmill.core.joining import check_name
from tokenmill.core.proof import read_secret, require_secret
from tokenmill.core.roles import Role
from tokenmill.core.sockets import parse_address

if TYPE_CHECKING:
    from tokenmill.core.messages import EngineInfo


def command(
    model: Annotated[str, typer.Argument(help="A short name, hf:org/repo[:file.gguf], or a path.")],
    join: Annotated[str, typer.Option(help="Where the gateway listens for workers.", metavar="HOST:PORT")],
    secret_file: Annotated[str, typer.Option(help="What gateway and workers show each other: 16 random bytes at least.", metavar="FILE")],
    role: Annotated[Role, typer.Option(help="What it is for: prompts, going on from them, or both.")] = Role.MIXED,
    name: Annotated[str | None, typer.Option(help="Its own among all workers; default: role and host.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What the gateway calls the model, if it is another name.")] = None,
    connector: Annotated[str, typer.Option(help="By which other workers read its KV: shm, tcp, nixl.", metavar="NAME")] = "tcp",
    host: Annotated[
        str | None, typer.Option(help="Where it listens for other workers; default: the address by which it reaches the gateway.")
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 0,
    advertise: Annotated[str | None, typer.Option(help="By which name other workers reach it, if that is another.", metavar="HOST")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="By which it knows gateway and workers; without it all is in the clear.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="What it shows to workers that read from it.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Of its certificate.")] = None,
    max_model_len: options.MaxModelLen = None,
    max_batch_size: Annotated[int, typer.Option(help="Sequences in one step.")] = 256,
    chunk_size: Annotated[int | None, typer.Option(help="Prompt tokens in one step; default: what suits the role.")] = None,
    threads: options.Threads = 0,
    cpus: options.Cpus = None,
    kv: options.Kv = options.KV,
    sparse: options.Sparse = None,
    kv_budget_mb: options.KvBudgetMb = None,
    speculate: options.Speculate = None,
    draft_model: options.DraftModel = None,
    draft_tokens: options.DraftTokens = None,
    kv_store: Annotated[
        str | None, typer.Option(help="Where KV is kept for all workers and their successors, as of serve.", metavar="URL")
    ] = None,
    kv_store_folder: options.KvStoreFolder = None,
    kv_store_ttl: options.KvStoreTtl = None,
    kv_memory_gb: Annotated[float | None, typer.Option(help="Memory of the KV cache; default: a share of what is free.")] = None,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for requests in flight to finish when it is ended.", min=0)] = 30.0,
) -> None:
    """Serve a gateway on another host as one of its workers.

    Ctrl-C or SIGTERM finishes what is in flight; a second one ends at once.
    """
    where = parse_address(join, param="--join")
    secret = require_secret(read_secret(secret_file), "--secret-file")
    name = check_name(name or f"{role}-{socket.gethostname().partition('.')[0]}")
    settings = options.kv_cache(kv, sparse, kv_budget_mb) | options.speculation(speculate, draft_model, draft_tokens)
    settings.setdefault("kv_cache_config", {})["memory_budget_gb"] = kv_memory_gb
    if kv_store == "embedded":
        raise ConfigError(
            "--kv-store embedded is of the workers that serve starts, and of no other host: name a server that all reach, as in "
            "valkey://host:6379, here and there",
            param="--kv-store",
        )
    settings |= options.store(kv_store, kv_store_folder, None, kv_store_ttl)
    from tokenmill.weights.catalogue import resolve, with_draft
    from tokenmill.worker.join import serve_gateway
    from tokenmill.worker.uplink import GatewayAddress

    gateway = GatewayAddress(*where, secret, None if tls_ca is None else _trust(tls_ca))
    link: dict[str, Any] = {"role": role.value, "connector": parse_connector(connector), "worker": name}
    if connector != "shm":
        link |= {"host": host or gateway.own_host(), "port": port, "advertise": advertise, "secret_file": secret_file}
        link |= {"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca}
    elif (host, port, advertise, tls_cert, tls_key) != (None, 0, None, None, None):
        raise ConfigError(
            "--host, --port, --advertise, --tls-cert and --tls-key are for --connector tcp and nixl: leave them out, or choose one of them",
            param="--connector",
        )
    path = resolve(model)
    own_name = path.stem if Path(model).expanduser() == path else model
    config = with_draft(
        EngineConfig.from_settings(
            model=str(path),
            served_name=served_model_name or own_name,
            max_model_len=max_model_len,
            max_batch_size=max_batch_size,
            chunk_size=chunk_size,
            threads=threads,
            cpus=cpus,
            kv_transfer_config=link,
            **settings,
        )
    )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")

    def announce(info: EngineInfo) -> None:
        told = f"{info.threads} threads, KV {info.kv_tokens} tokens"
        print(f"joined {gateway} as {name} ({role}, {told}; Ctrl-C ends it)", flush=True)

    print(f"tokenmill {__version__}: loading {config.name} from {path}", flush=True)
    serve_gateway(config, name, role, gateway, shutdown_timeout, announce=announce)


def _trust(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"--tls-ca {path} cannot be used: {error.strerror or error}", param="--tls-ca") from None
