"""KV settings as people write them on a command line, `int8/int4:64` and `topk_heads:0.7@0.8`, and what they are in a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from tokenmill.core.errors import ConfigError
from tokenmill.core.types import KVType, Strategy

WIDE: KVType = "bf16"
TYPES: dict[str, KVType] = {name: name for name in get_args(KVType)}
STRATEGIES: dict[str, Strategy] = {name: name for name in get_args(Strategy) if name != "none"}


@dataclass(frozen=True)
class Format:
    """How keys and values are stored. calibrated: keys with the factors of `tokenmill calibrate`, or with the plain scheme."""

    key: KVType = WIDE
    value: KVType = WIDE
    group_size: int | None = None
    calibrated: bool = True

    @classmethod
    def parse(cls, text: str) -> Format:
        """`bf16`, or `key/value[:group size][:plain]`. Raises `ConfigError`."""
        if text == WIDE:
            return cls()
        dtypes, *rest = text.split(":")
        key, _, value = dtypes.partition("/")
        plain = rest[-1:] == ["plain"]
        sizes = rest[:-1] if plain else rest
        known = key in TYPES and value in TYPES and (key, value) != (WIDE, WIDE)
        if not known or len(sizes) > 1 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ConfigError(
                f"--kv is {text!r}, but must be bf16 or KEY/VALUE[:GROUP][:plain] of {', '.join(TYPES)}, such as int8/int4:64",
                param="--kv",
            )
        return cls(TYPES[key], TYPES[value], int(sizes[0]) if sizes else None, not plain)

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        if self.key == self.value == WIDE:
            return WIDE
        return f"{self.key}/{self.value}" + (f":{self.group_size}" if self.group_size else "") + ("" if self.calibrated else ":plain")


@dataclass(frozen=True)
class Sparsity:
    """How KV is given up once a request has nearly used its budget. trigger: the share of the budget at which it begins, if it is not
    the engine's own."""

    strategy: Strategy
    keep_ratio: float
    trigger: float | None = None

    @classmethod
    def parse(cls, text: str) -> Sparsity:
        """`strategy:keep ratio[@trigger]`. Raises `ConfigError`."""
        strategy, _, level = text.partition(":")
        ratio, at, trigger = level.partition("@")
        try:
            found = cls(STRATEGIES[strategy], float(ratio), float(trigger) if at else None)
        except (KeyError, ValueError):
            found = None
        if found is None or not 0 <= found.keep_ratio < 1 or not (found.trigger is None or 0 < found.trigger <= 1):
            raise ConfigError(
                f"--sparse is {text!r}, but must be {' or '.join(STRATEGIES)}, a ratio from 0 to below 1, and if it is to begin elsewhere "
                "than near the budget's end a share of it up to 1: topk_heads:0.7, or topk_heads:0.7@0.5",
                param="--sparse",
            )
        return found

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"{self.strategy}:{self.keep_ratio:g}" + ("" if self.trigger is None else f"@{self.trigger:g}")


def at_least(number: float, digits: int = 3) -> str:
    """A number with so many decimals, rounded up: who sets what a message names is not told the same again."""
    return f"{math.ceil(number * 10**digits - 1e-6) / 10**digits:.{digits}f}"


def kv_settings(format: Format, sparsity: Sparsity | None, budget_mb: float | None) -> dict[str, Any]:
    """Those of `EngineConfig`: none for bf16, whole and without a budget (MiB of each request)."""
    cache: dict[str, Any] = {}
    if format.name != WIDE:
        method = "minmax" if format.calibrated else "none"
        size = {} if format.group_size is None else {"group_size": format.group_size}
        stored = {"key_dtype": format.key, "value_dtype": format.value, "calibration_method": method}
        cache["compression"] = {"enabled": True, **stored, **size}
    if budget_mb is not None:
        cache["per_request_budget_gb"] = budget_mb / 1024
    settings: dict[str, Any] = {"kv_cache_config": cache} if cache else {}
    if sparsity is not None:
        chosen = {"strategy": sparsity.strategy, "keep_ratio": sparsity.keep_ratio}
        trigger = {} if sparsity.trigger is None else {"trigger_threshold": sparsity.trigger}
        settings["attention_config"] = {"sparse_attention": {"enabled": True, **chosen, **trigger}}
    return settings
