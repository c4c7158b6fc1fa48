"""Every engine setting, resolved once and frozen.

`EngineConfig.from_settings(**settings)` accepts nested dicts or the typed classes, in the article's spelling. A
setting that is unknown is an error naming the nearest known one; nothing is ever ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from tokenmill.core.connectors import parse_connector
from tokenmill.core.cpus import parse_cpus
from tokenmill.core.errors import ConfigError
from tokenmill.core.roles import Role
from tokenmill.core.settings import convert, drop_what_is_so_anyway
from tokenmill.core.types import FRAME, KVType, Strategy

PAGE_TOKENS = (8, 16, 32, 64)
MAX_DRAFT = 48
"""Tokens in a draft."""

DEFAULT_SHARE = 0.25
"""For the KV pool, of the memory that is available once the weights are loaded."""

MAX_STEP_MS = 100.0
"""About as long between two tokens of a stream goes unnoticed by who reads it."""

SchedulerName: TypeAlias = Literal["prefill_optimized", "decode_optimized", "mixed"]

_CHUNKS: dict[SchedulerName, int] = {"prefill_optimized": 2048, "decode_optimized": 512, "mixed": 512}


class BlockManagerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV pages are cut. `block_size` is `"dynamic"` or one of 8, 16, 32, 64 tokens."""

    version: Literal["v2"] = "v2"
    block_size: Literal["dynamic"] | int = "dynamic"
    min_block_size: int = 8
    max_block_size: int = 64
    enable_prefix_sharing: bool = True
    prefix_sharing_strategy: Literal["radix", "none"] = "radix"

    @property
    def smallest_page(self) -> int:
        """Tokens in the smallest page."""
        return self.min_block_size if self.block_size == "dynamic" else int(self.block_size)

    @property
    def largest_page(self) -> int:
        """Tokens in the largest page."""
        return self.max_block_size if self.block_size == "dynamic" else int(self.block_size)

    @property
    def shares_prefixes(self) -> bool:
        return self.enable_prefix_sharing and self.prefix_sharing_strategy == "radix"

    def __post_init__(self) -> None:
        sizes = [("min_block_size", self.min_block_size), ("max_block_size", self.max_block_size)]
        if self.block_size != "dynamic":
            sizes.append(("block_size", int(self.block_size)))
        for name, value in sizes:
            if value not in PAGE_TOKENS:
                raise ConfigError(f"block_manager_config: {name} is {value}, but must be one of {PAGE_TOKENS}", param=name)
        if self.min_block_size > self.max_block_size:
            raise ConfigError(
                f"block_manager_config: min_block_size {self.min_block_size} is above max_block_size {self.max_block_size}",
                param="min_block_size",
            )


class CompressionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantised KV (docs/compressed-kv.md).

    calibration_method: `minmax` scales each channel of keys by the extremes that `tokenmill calibrate` found, which are found at the
    first start if need be; `none` by what each token holds alone. group_size: channels that share a scale, at most a head.
    """

    enabled: bool = False
    key_dtype: KVType = "int8"
    value_dtype: KVType = "int4"
    calibration_method: Literal["minmax", "none"] = "minmax"
    group_size: int = 128

    def __post_init__(self) -> None:
        if not 32 <= self.group_size <= 1024 or self.group_size % 32:
            raise ConfigError(
                f"compression: group_size is {self.group_size}, but must be a multiple of 32 between 32 and 1024", param="group_size"
            )


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pool, in GiB. `memory_budget_gb` None takes a share of the memory that is free at start. `per_request_budget_gb` is what
    the KV of one answer may take (None: any part of the pool)."""

    dtype: Literal["auto", "bf16", "bfloat16"] = "auto"
    compression: CompressionConfig = CompressionConfig()
    memory_budget_gb: float | None = None
    per_request_budget_gb: float | None = None
    eviction_policy: Literal["lru"] = "lru"

    def __post_init__(self) -> None:
        for name in ("memory_budget_gb", "per_request_budget_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e6:
                raise ConfigError(f"{name} is {value}, but must be above 0 and below 1000000", param=name)


class SparseAttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer gives up when `trigger_threshold` of its KV budget is used (docs/sparse-attention.md). Without a budget it never does.

    topk_heads: all but `keep_ratio` of the heads keep the first and the latest positions only. topk_positions: of the positions that
    may go, `keep_ratio` stay. none: nothing goes, and an answer ends when its budget is used up, as without sparse attention.
    """

    enabled: bool = False
    strategy: Strategy = "topk_heads"
    keep_ratio: float = 0.7
    trigger_threshold: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.keep_ratio < 1:
            raise ConfigError(f"sparse_attention: keep_ratio is {self.keep_ratio}, but must be at least 0 and below 1", param="keep_ratio")
        if not 0 < self.trigger_threshold <= 1:
            raise ConfigError(
                f"sparse_attention: trigger_threshold is {self.trigger_threshold}, but must be above 0 and at most 1",
                param="trigger_threshold",
            )


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of the KV cache attention looks at."""

    sparse_attention: SparseAttentionConfig = SparseAttentionConfig()


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who guesses how answers go on, so that a step gives several tokens (docs/speculation.md).

    method: None is `draft` if there is a `model`, a smaller one of the same vocabulary (a path), and else nobody. num_speculative_tokens:
    of a draft at most. acceptance_threshold: share of drafted tokens that must be right for an answer to get more of them. verify:
    `coupled` never changes an answer; `rejection` takes more of a draft model's tokens at a temperature, and answers differ from those
    without a draft, though their distribution does not.
    """

    method: Literal["draft", "ngram", "suffix", "combined", "none"] | None = None
    model: str | None = None
    num_speculative_tokens: int = 8
    acceptance_threshold: float = 0.0
    verify: Literal["coupled", "rejection"] = "coupled"

    @property
    def chosen(self) -> Literal["draft", "ngram", "suffix", "combined", "none"]:
        if self.method is not None:
            return self.method
        return "none" if self.model is None else "draft"

    @property
    def model_name(self) -> str | None:
        """What the draft model is called where people read it."""
        return None if self.model is None else Path(self.model).stem

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFT:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens is {self.num_speculative_tokens}, but must be between 1 and {MAX_DRAFT}",
                param="num_speculative_tokens",
            )
        if not 0 <= self.acceptance_threshold <= 1:
            raise ConfigError(
                f"speculative_config: acceptance_threshold is {self.acceptance_threshold}, but must be between 0 and 1",
                param="acceptance_threshold",
            )
        asked = any(getattr(self, field.name) != field.default for field in msgspec.structs.fields(self))
        if asked and self.method is None and self.model is None:
            raise ConfigError(
                "speculative_config says how to draft, but not who does: choose method suffix, or name a smaller model", param="method"
            )
        if self.method in ("draft", "combined") and self.model is None:
            raise ConfigError(f"speculative_config: method {self.method} needs a model: name one, or choose ngram or suffix", param="model")
        if self.model is not None and self.method not in (None, "draft", "combined"):
            raise ConfigError(
                f"speculative_config: method {self.method} has no use for a model: leave one of them out, or choose combined", param="model"
            )


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is among others, and how they read its frames and it reads theirs (docs/pd.md).

    role: `both` is another word for `mixed`; None: what it is started as. connector: by which others read this worker's frames; it reads
    by whichever an address names. worker: its name among them. The rest is of `tcp` and `nixl`. host, port: where it listens (0: any
    port). advertise: under which name others reach it, if that is another. secret_file: has what all workers share, at least 16 random
    bytes. tls_cert, tls_key, tls_ca: files by which it shows who it is, and by which it knows others; without them all is in the clear.
    """

    role: Literal["prefill", "decode", "mixed", "both"] | None = None
    connector: str = "shm"
    worker: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    secret_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @property
    def chosen_role(self) -> Role | None:
        return None if self.role is None else Role.MIXED if self.role == "both" else Role(self.role)

    def __post_init__(self) -> None:
        parse_connector(self.connector)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"kv_transfer_config: port is {self.port}, but must be between 0 (any) and 65535", param="port")
        if self.connector == "shm":
            for name in ("host", "port", "advertise", "secret_file", "tls_cert", "tls_key", "tls_ca"):
                if getattr(self, name) != _default(self, name):
                    raise ConfigError(
                        f"kv_transfer_config: {name} is for connectors tcp and nixl, and shm, which does not leave the host, has no use "
                        "for it: leave it out, or choose tcp",
                        param=name,
                    )
        elif self.secret_file is None:
            raise ConfigError(
                f"kv_transfer_config: connector {self.connector} needs secret_file, a file with at least 16 random bytes that all workers "
                "share: name one, or choose shm, which reaches workers of the same host and needs none",
                param="secret_file",
            )
        files = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        missing = [name for name, path in files.items() if path is None]
        if 0 < len(missing) < len(files):
            raise ConfigError(
                f"kv_transfer_config: TLS needs tls_cert, tls_key and tls_ca, and there is no {' and no '.join(missing)}: give all three "
                "or none",
                param=missing[0],
            )


class KVStoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where keys and values are kept beyond the engine that computed them (docs/kv-store.md).

    url: of a server, as in `valkey://127.0.0.1:6379`, or `embedded` for one that comes along. folder: of this host, beside a server or
    instead of one. memory_gb: GiB of the embedded server. folder_gb: GiB of all files in the folder. ttl: seconds that a server keeps what
    nobody stores again.
    """

    url: str | None = None
    folder: str | None = None
    memory_gb: float = 1.0
    folder_gb: float = 16.0
    ttl: int = 3600

    @property
    def is_embedded(self) -> bool:
        return self.url == "embedded"

    def __post_init__(self) -> None:
        if self.url is None and self.folder is None:
            raise ConfigError("kv_store_config names no server and no folder: give url (embedded will do), folder, or both", param="url")
        for name, least, most in (("memory_gb", 1 / 64, 1e6), ("folder_gb", 1 / 64, 1e6), ("ttl", 1, 10**9)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"kv_store_config: {name} is {value:g}, but must be between {least:g} and {most:g}", param=name)
        for name, has, what in (
            ("memory_gb", self.is_embedded, "url embedded; other servers have settings of their own"),
            ("folder_gb", self.folder is not None, "a folder"),
            ("ttl", self.url is not None, "a server"),
        ):
            if not has and getattr(self, name) != _default(self, name):
                raise ConfigError(f"kv_store_config: {name} is for {what}: leave it out", param=name)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that an engine needs to be built.

    model: path of a .gguf file or of a Hugging Face folder (the catalogue resolves names before).
    max_model_len: tokens of prompt plus output; None is the model's own context, as far as the KV pool holds it.
    max_batch_size: sequences in one step. chunk_size: prompt tokens in one step, over all sequences; None: as many as suit the scheduler.
    scheduler: `prefill_optimized` computes prompts in large chunks, `decode_optimized` keeps steps in which streams decode below
    `max_step_ms` (docs/pd.md); None: what suits the role of `kv_transfer_config`, and without one `mixed`.
    kv_transfer_config: None: an engine that has no others beside it. kv_store_config: None: what it forgets is computed again.
    threads: 0 takes the CPUs this process may use. cpus: `0-3,8` keeps each thread on a CPU of its own (docs/kernels.md).
    """

    model: str
    served_name: str | None = None
    max_model_len: int | None = None
    max_batch_size: int = 256
    enable_chunked_prefill: bool = True
    chunk_size: int | None = None
    scheduler: SchedulerName | None = None
    max_step_ms: float | None = None
    threads: int = 0
    cpus: str | None = None
    gpu_memory_utilization: float | None = None
    """Share of free memory for the KV pool when `memory_budget_gb` is not given (the article's name for it)."""
    block_manager_config: BlockManagerConfig = BlockManagerConfig()
    kv_cache_config: KVCacheConfig = KVCacheConfig()
    attention_config: AttentionConfig = AttentionConfig()
    speculative_config: SpeculativeConfig = SpeculativeConfig()
    kv_transfer_config: KVTransferConfig | None = None
    kv_store_config: KVStoreConfig | None = None

    @classmethod
    def from_settings(cls, **settings: Any) -> EngineConfig:
        """Build a config from keyword settings; raises `ConfigError`."""
        drop_what_is_so_anyway(settings)
        return convert(settings, cls, "")

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self.served_name or Path(self.model).stem

    @property
    def role(self) -> Role | None:
        """Among other workers; None: there are none, or it was not said."""
        return None if self.kv_transfer_config is None else self.kv_transfer_config.chosen_role

    @property
    def chosen_scheduler(self) -> SchedulerName:
        if self.scheduler is not None:
            return self.scheduler
        match self.role:
            case Role.PREFILL:
                return "prefill_optimized"
            case Role.DECODE:
                return "decode_optimized"
            case _:
                return "mixed"

    @property
    def chunk(self) -> int:
        """Prompt tokens in one step."""
        return self.chunk_size if self.chunk_size is not None else _CHUNKS[self.chosen_scheduler]

    @property
    def longest_step(self) -> float | None:
        """Seconds that a step in which streams decode may take for the sake of prompts; None: any."""
        if self.chosen_scheduler != "decode_optimized":
            return None
        return (MAX_STEP_MS if self.max_step_ms is None else self.max_step_ms) / 1000

    @property
    def memory_share(self) -> float:
        """For the KV pool, of what is available, if there is no `memory_budget_gb`."""
        return DEFAULT_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    def __post_init__(self) -> None:
        def need(ok: bool, param: str, wanted: str) -> None:
            if not ok:
                raise ConfigError(f"{param} is {getattr(self, param)!r}, but must be {wanted}", param=param)

        need(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2")
        need(1 <= self.max_batch_size <= 4096, "max_batch_size", "between 1 and 4096")
        need(self.chunk_size is None or FRAME <= self.chunk_size <= 16384, "chunk_size", f"between {FRAME} and 16384")
        need(self.max_step_ms is None or 1 <= self.max_step_ms <= 1e5, "max_step_ms", "between 1 and 100000")
        need(0 <= self.threads <= 256, "threads", "between 1 and 256, or 0 for all CPUs")
        parse_cpus(self.cpus, self.threads)
        share = self.gpu_memory_utilization
        need(share is None or 0 < share <= 1, "gpu_memory_utilization", "above 0 and at most 1")
        if self.chosen_scheduler == "decode_optimized" and not self.enable_chunked_prefill:
            raise ConfigError(
                "scheduler is decode_optimized, which cuts prompts so that steps stay short, but enable_chunked_prefill is False: leave "
                "that out, or choose scheduler mixed",
                param="scheduler",
            )
        if self.max_step_ms is not None and self.chosen_scheduler != "decode_optimized":
            raise ConfigError(
                f"max_step_ms is {self.max_step_ms:g}, but scheduler {self.chosen_scheduler} does not bound steps: leave it out, or choose "
                "scheduler decode_optimized",
                param="max_step_ms",
            )
        if not self.block_manager_config.shares_prefixes:
            if self.role in (Role.PREFILL, Role.DECODE):
                self._need_prefixes(f"a {self.role} worker", "what another worker has computed", "use mixed workers")
            if self.kv_store_config is not None:
                self._need_prefixes("a KV store", "what comes from it", "do without kv_store_config")

    def _need_prefixes(self, who: str, what: str, instead: str) -> None:
        raise ConfigError(
            f"{who} needs prefix sharing, since {what} is found like a prefix: leave enable_prefix_sharing and prefix_sharing_strategy out "
            f"of block_manager_config, or {instead}",
            param="block_manager_config",
        )


def _default(struct: msgspec.Struct, name: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(struct) if field.name == name)
