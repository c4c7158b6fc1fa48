"""`tokenmill serve`"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tokenmill import __version__
from tokenmill.cli import options
from tokenmill.core.config import EngineConfig, KVStoreConfig
from tokenmill.core.cpus import usable_cpus
from tokenmill.core.errors import ConfigError

if TYPE_CHECKING:
    from tokenmill.cluster.division import WorkerPlan
    from tokenmill.core.messages import EngineInfo
    from tokenmill.gateway.served_model import ServedModel
    from tokenmill.text.tokenizer import Tokenizer

DEFAULT = "smollm2:135m"

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}


def command(
    model: Annotated[
        list[str] | None,
        typer.Argument(help=f"A short name, hf:org/repo[:file.gguf], or a path; of several each is served. Default: {DEFAULT}."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="TOKENMILL_API_KEY", help="Ask clients for this key.")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="What clients call the model; may be given several times.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="chatml, or a Jinja file, instead of the model's own.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of prompt plus answer.")] = None,
    max_batch_size: Annotated[int, typer.Option(help="Sequences in one step.")] = _DEFAULTS["max_batch_size"],
    chunk_size: Annotated[int | None, typer.Option(help="Prompt tokens in one step; default: 512.")] = _DEFAULTS["chunk_size"],
    threads: options.Threads = _DEFAULTS["threads"],
    cpus: options.Cpus = _DEFAULTS["cpus"],
    kv: options.Kv = options.KV,
    sparse: options.Sparse = None,
    kv_budget_mb: options.KvBudgetMb = None,
    speculate: options.Speculate = None,
    draft_model: options.DraftModel = None,
    draft_tokens: options.DraftTokens = None,
    prefill: options.Prefill = 0,
    decode: options.Decode = 0,
    mixed: options.Mixed = 0,
    connector: options.Link = None,
    secret_file: options.SecretFile = None,
    listen_workers: Annotated[
        str | None, typer.Option(help="Where workers of other hosts join (tokenmill worker).", metavar="HOST:PORT")
    ] = None,
    workers_tls_cert: Annotated[str | None, typer.Option(help="What workers that join are shown.", metavar="FILE")] = None,
    workers_tls_key: Annotated[str | None, typer.Option(help="Of this certificate.", metavar="FILE")] = None,
    kv_store: options.KvStore = None,
    kv_store_folder: options.KvStoreFolder = None,
    kv_store_gb: options.KvStoreGb = None,
    kv_store_ttl: options.KvStoreTtl = None,
    routing_strategy: options.Strategy = None,
    health_check_interval: options.HealthCheckInterval = None,
    kv_memory_gb: Annotated[float | None, typer.Option(help="Memory of the KV cache; default: a share of what is free.")] = None,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds for requests in flight to finish at a shutdown.", min=0)] = 30.0,
) -> None:
    """Serve one or several models over an OpenAI-compatible API.

    Ctrl-C or SIGTERM finishes what is in flight; a second one ends at once.
    """
    if api_key == "":
        raise ConfigError("--api-key is empty: leave it out, or give a key", param="api_key")
    models = model or [DEFAULT]
    options.only_of_one(models, served_model_name=served_model_name, chat_template=chat_template, draft_model=draft_model)
    settings = options.kv_cache(kv, sparse, kv_budget_mb) | options.speculation(speculate, draft_model, draft_tokens)
    settings.setdefault("kv_cache_config", {})["memory_budget_gb"] = kv_memory_gb
    workers = options.workers(prefill, decode, mixed, joining=listen_workers is not None)
    settings |= options.transfer(workers, connector, secret_file) | options.store(kv_store, kv_store_folder, kv_store_gb, kv_store_ttl)
    router, health = options.routing(workers, routing_strategy, health_check_interval)
    from tokenmill.gateway.server import listen, serve

    listening = None
    if listen_workers is not None:
        listening = options.listening(listen_workers, secret_file, workers_tls_cert, workers_tls_key)
    elif workers_tls_cert is not None or workers_tls_key is not None:
        raise ConfigError("--workers-tls-cert and --workers-tls-key are for --listen-workers: leave them out", param="--workers-tls-cert")
    sock = listen(host, port)
    from tokenmill.cluster.division import divide_among
    from tokenmill.cluster.keeping import with_store
    from tokenmill.cluster.local import Cluster
    from tokenmill.core.memory import available_memory
    from tokenmill.gateway.served_model import ServedModel
    from tokenmill.gateway.service import Service
    from tokenmill.weights.catalogue import resolve, with_draft

    chosen = None
    if chat_template is not None:
        from tokenmill.text.templates import choose_template

        chosen = choose_template(chat_template)
    paths = [resolve(model) for model in models]
    names = options.served_names(models, paths, served_model_name or [])
    configs = [
        with_draft(
            EngineConfig.from_settings(
                model=str(path),
                served_name=own[0],
                max_model_len=max_model_len,
                max_batch_size=max_batch_size,
                chunk_size=chunk_size,
                threads=threads,
                cpus=cpus,
                **settings,
            )
        )
        for path, own in zip(paths, names, strict=True)
    ]
    configs, store = with_store(configs)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

    def serving(path: Path, names: list[str], config: EngineConfig, plans: Sequence[WorkerPlan]) -> ServedModel:
        def load_vocabulary() -> Tokenizer:
            from tokenmill.weights.vocabulary import load_tokenizer  # while the engine process loads, on another CPU

            return load_tokenizer(path)

        cluster = Cluster(config, plans, router=router, health=health, joining=listening is not None)
        return ServedModel(cluster, load_vocabulary, names, chosen)

    plans = divide_among(configs, workers, usable_cpus(), available_memory())
    service = Service([serving(*one) for one in zip(paths, names, configs, plans, strict=True)], api_key, listening)

    def announce(model: ServedModel) -> None:
        url, cluster = _url(host, sock.getsockname()[1]), model.cluster
        kept = configs[0].kv_store_config
        print(ready_text(cluster.info, model.names[0], url, api_key is not None, model.prompts.can_chat, cluster.workers, kept), flush=True)

    for path, own in zip(paths, names, strict=True):
        print(f"tokenmill {__version__}: loading {own[0]} from {path}", flush=True)
    with store or contextlib.nullcontext():
        asyncio.run(serve(service, sock, shutdown_timeout, announce))


def ready_text(
    info: EngineInfo,
    name: str,
    url: str,
    with_key: bool,
    can_chat: bool,
    workers: Mapping[str, EngineInfo],
    store: KVStoreConfig | None = None,
) -> str:
    """What is printed when requests are taken. info: of any worker. workers: all of them by name. store: theirs, if there is one."""
    body: dict[str, object]
    if can_chat:
        path, body = "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    else:
        path, body = "/v1/completions", {"model": name, "prompt": "The sky is blue because", "max_tokens": 64}
    key = " -H 'Authorization: Bearer KEY'" if with_key else ""
    return "\n".join(
        [
            f"ready after {info.load_seconds:.1f} s: {url}/v1 (Ctrl-C ends it)",
            f"  model    {name} ({info.architecture}), context {info.max_model_len} tokens",
            *(_alone(info) if len(workers) == 1 else _several(info, workers)),
            *([] if store is None else [f"  store    {_store(store)}"]),
            f"  try      curl {url}{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'",
        ]
    )


def _alone(info: EngineInfo) -> list[str]:
    return [f"  KV       {_kv(info)}", *_drafts(info), f"  compute  {_threads(info)}, {info.kernels} kernels"]


def _several(info: EngineInfo, workers: Mapping[str, EngineInfo]) -> list[str]:
    width = max(map(len, workers))
    each = [f"           {name:{width}}  {_threads(own)}, KV {_kv(own)}" for name, own in workers.items()]
    return [f"  workers  {len(workers)}, {info.kernels} kernels", *each, *_drafts(info)]


def _kv(info: EngineInfo) -> str:
    return f"{info.kv_tokens} tokens ({info.kv_bytes / 1e9:.2f} GB of {info.kv_format})"


def _threads(info: EngineInfo) -> str:
    where = f" on CPUs {info.cpus}" if info.cpus else ""
    return f"{info.threads} thread{'s' * (info.threads != 1)}{where}"


def _store(store: KVStoreConfig) -> str:
    from tokenmill.transfer.store.address import parse_address

    server = [] if store.url is None else [parse_address(store.url).shown]
    return " and ".join([*server, *([] if store.folder is None else [store.folder])])


def _drafts(info: EngineInfo) -> list[str]:
    if info.proposer is None:
        return []
    return [f"  drafts   by {info.proposer}{'' if info.draft_model is None else f' ({info.draft_model})'}"]


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
