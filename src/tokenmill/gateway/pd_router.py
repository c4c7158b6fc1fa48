"""`PDRouter`: prefill and decode workers on this host behind one OpenAI-compatible server, from Python."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tokenmill.cluster.division import WorkerPlan, Workers, divide
from tokenmill.cluster.health import HealthPolicy
from tokenmill.cluster.keeping import with_store
from tokenmill.cluster.local import Cluster
from tokenmill.cluster.router import RouterPolicy
from tokenmill.core.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from tokenmill.core.cpus import usable_cpus
from tokenmill.core.errors import ConfigError
from tokenmill.core.memory import available_memory
from tokenmill.core.roles import Role
from tokenmill.gateway.served_model import ServedModel
from tokenmill.gateway.server import listen, serve
from tokenmill.gateway.service import Service
from tokenmill.observe.separation import PDMetrics
from tokenmill.weights.catalogue import resolve, with_draft

if TYPE_CHECKING:
    from tokenmill.text.tokenizer import Tokenizer

Settings = Mapping[str, Any]
"""Those of an `LLM`, with its `model`."""


class PDRouter:
    """Workers of one model, each a process, of which some compute prompts and others decode (docs/pd.md).

    prefill_engines, decode_engines, mixed_engines: the settings of each worker, as of an `LLM` with its `model`. Threads, CPUs and KV
    memory that a worker does not name are its share of the host's. routing_strategy, health_check_interval: docs/routing.md.

    Raises `ConfigError` for settings that do not go together, before anything is loaded, and `ModelNotFound`.
    """

    def __init__(
        self,
        prefill_engines: Sequence[Settings],
        decode_engines: Sequence[Settings],
        *,
        mixed_engines: Sequence[Settings] = (),
        routing_strategy: str = "min_decode_queue",
        health_check_interval: float = 5.0,
    ) -> None:
        workers = Workers(prefill=len(prefill_engines), decode=len(decode_engines), mixed=len(mixed_engines))
        router = RouterPolicy(routing_strategy=routing_strategy)
        health = HealthPolicy(health_check_interval=health_check_interval)
        engines = [_read(one) for one in (*prefill_engines, *decode_engines, *mixed_engines)]
        for engine, role in zip(engines, workers.roles, strict=True):
            if engine.config.role not in (None, Role.MIXED, role):
                what = f"role is {engine.config.role}, but the engine is among the {role}_engines"
                raise ConfigError(f"kv_transfer_config: {what}: leave it out", param="kv_transfer_config")
        for name, found in (
            ("model", [engine.config.model for engine in engines]),
            ("served_name", [engine.config.served_name for engine in engines]),
            ("kv_cache_config.compression", [engine.config.kv_cache_config.compression for engine in engines]),
            ("attention_config", [engine.config.attention_config for engine in engines]),
            ("kv_store_config", [engine.config.kv_store_config for engine in engines]),
            ("kv_transfer_config", [_link(engine.config) for engine in engines]),
        ):
            if any(one != found[0] for one in found):
                raise ConfigError(f"{name} is not the same for all engines, but they go on with each other's work: make it so", param=name)
        model = engines[0].config.model
        self._path = resolve(model)
        self.model: str = engines[0].config.served_name or model
        drafting = next((e.config.speculative_config for e in engines if e.config.speculative_config.model), SpeculativeConfig())
        config = with_draft(
            msgspec.structs.replace(
                engines[0].config,
                model=str(self._path),
                served_name=self.model,
                threads=0,
                cpus=None,
                kv_cache_config=msgspec.structs.replace(engines[0].config.kv_cache_config, memory_budget_gb=None),
                kv_transfer_config=_link(engines[0].config),
                speculative_config=drafting,
            )
        )
        (self._config,), self._store = with_store([config])
        plans = divide(self._config, workers, usable_cpus(), available_memory())
        self._plans = [_own(plan, engine) for plan, engine in zip(plans, engines, strict=True)]
        self._cluster = Cluster(self._config, self._plans, router=router, health=health)

    @property
    def metrics(self) -> PDMetrics:
        """Of the requests that have been answered."""
        return self._cluster.metrics

    def serve(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        api_type: str = "openai",
        *,
        api_key: str | None = None,
        shutdown_timeout: float = 30.0,
        on_ready: Callable[[str], None] = lambda url: print(f"ready: {url}/v1", flush=True),
    ) -> None:
        """Serve until SIGINT or SIGTERM; then what is in flight has `shutdown_timeout` seconds. on_ready: is told where.

        Raises `ConfigError` for an address that cannot be had, and what made a worker fail to load.
        """
        if api_type != "openai":
            raise ConfigError(f"api_type is {api_type!r}, but must be 'openai'", param="api_type")
        sock = listen(host, port)
        service = Service([ServedModel(self._cluster, self._vocabulary, [self.model])], api_key)
        number = sock.getsockname()[1]

        def announce(model: ServedModel) -> None:
            on_ready(f"http://{host}:{number}")

        with self._store or contextlib.nullcontext():
            asyncio.run(serve(service, sock, shutdown_timeout, announce))

    def _vocabulary(self) -> Tokenizer:
        from tokenmill.weights.vocabulary import load_tokenizer

        return load_tokenizer(self._path)


class _Engine(NamedTuple):
    """One worker's settings, and the names of those that were given."""

    config: EngineConfig
    given: frozenset[str]


def _read(settings: Settings) -> _Engine:
    if isinstance(settings, str):
        raise ConfigError(
            f"an engine is {settings!r}, but must be settings such as {{'model': 'smollm2:135m'}}: a worker that runs elsewhere joins by "
            "`tokenmill worker --join`",
            param="prefill_engines",
        )
    if not isinstance(settings.get("model"), str):
        raise ConfigError("an engine names no model: give its settings a `model`", param="model")
    return _Engine(EngineConfig.from_settings(**settings), frozenset(settings))


def _link(config: EngineConfig) -> KVTransferConfig:
    """How a worker hands over, whatever its role."""
    return msgspec.structs.replace(config.kv_transfer_config or KVTransferConfig(), role=None, worker=None)


def _own(plan: WorkerPlan, engine: _Engine) -> WorkerPlan:
    """The plan, with what its engine names for itself."""
    cache = engine.config.kv_cache_config
    if cache.memory_budget_gb is None:
        cache = msgspec.structs.replace(cache, memory_budget_gb=plan.config.kv_cache_config.memory_budget_gb)
    changed: dict[str, Any] = {name: getattr(engine.config, name) for name in engine.given - _OTHERWISE} | {"kv_cache_config": cache}
    if "threads" in engine.given and "cpus" not in engine.given:
        changed["cpus"] = None
    if plan.role is not Role.PREFILL:
        drafts = engine.config.speculative_config
        changed["speculative_config"] = drafts if drafts.model is None else plan.config.speculative_config
    return plan._replace(config=msgspec.structs.replace(plan.config, **changed))


_OTHERWISE = frozenset(
    (
        "model",
        "served_name",
        "kv_cache_config",
        "kv_store_config",
        "kv_transfer_config",
        "speculative_config",
        "tensor_parallel_size",
        "dtype",
    )
)
"""Settings that are not taken over as they are."""
