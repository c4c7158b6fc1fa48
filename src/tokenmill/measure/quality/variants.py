"""The KV settings that are compared: how they are written on a command line, and what they are as settings of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tokenmill.core.errors import ConfigError

WIDE = "bf16"
DTYPES = (WIDE, "int8", "int4")


@dataclass(frozen=True)
class Format:
    """How keys and values are stored. calibrated: keys with the factors of `tokenmill calibrate`, or with the plain scheme."""

    key: str = WIDE
    value: str = WIDE
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
        known = key in DTYPES and value in DTYPES and (key, value) != (WIDE, WIDE)
        if not known or len(sizes) > 1 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ConfigError(
                f"--kv is {text!r}, but must be bf16 or KEY/VALUE[:GROUP][:plain] of {', '.join(DTYPES)}, such as int8/int4:64",
                param="--kv",
            )
        return cls(key, value, int(sizes[0]) if sizes else None, not plain)

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        if self.key == self.value == WIDE:
            return WIDE
        return f"{self.key}/{self.value}" + (f":{self.group_size}" if self.group_size else "") + ("" if self.calibrated else ":plain")


@dataclass(frozen=True)
class Sparsity:
    """How positions are dropped once a request has nearly used its budget, of MiB."""

    strategy: str
    keep_ratio: float
    budget_mb: float

    @classmethod
    def parse(cls, text: str, budget_mb: float) -> Sparsity:
        """`strategy:keep ratio`; which strategies there are is known to the engine's configuration. Raises `ConfigError`."""
        strategy, _, ratio = text.partition(":")
        try:
            return cls(strategy, float(ratio), budget_mb)
        except ValueError:
            raise ConfigError(f"--sparse is {text!r}, but must be STRATEGY:KEEP_RATIO such as topk_heads:0.7", param="--sparse") from None

    @property
    def name(self) -> str:
        return f"{self.strategy}:{self.keep_ratio:g} of {self.budget_mb:g} MB"


@dataclass(frozen=True)
class Variant:
    """One way of keeping KV. The first of a list is the reference: bf16, and whole."""

    format: Format = Format()
    sparsity: Sparsity | None = None

    @property
    def name(self) -> str:
        return self.format.name if self.sparsity is None else f"{self.format.name} {self.sparsity.name}"

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `EngineConfig` that make it so; the reference has none."""
        cache: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        if self.format.name != WIDE:
            method = "minmax" if self.format.calibrated else "none"
            stored = {"key_dtype": self.format.key, "value_dtype": self.format.value, "calibration_method": method}
            size = {} if self.format.group_size is None else {"group_size": self.format.group_size}
            cache["compression"] = {"enabled": True, **stored, **size}
        if self.sparsity is not None:
            cache["per_request_budget_gb"] = self.sparsity.budget_mb / 1024
            chosen = {"strategy": self.sparsity.strategy, "keep_ratio": self.sparsity.keep_ratio}
            settings["attention_config"] = {"sparse_attention": {"enabled": True, **chosen}}
        return settings | ({"kv_cache_config": cache} if cache else {})


REFERENCE = Variant()


def parse_variants(formats: Sequence[str], sparse: Sequence[str], budget_mb: float | None) -> list[Variant]:
    """Every format whole and at every level, the reference first whether it is named or not. Raises `ConfigError`."""
    if sparse and budget_mb is None:
        raise ConfigError("--sparse needs --budget-mb: a request is sparsified when it has nearly used its budget", param="--budget-mb")
    if budget_mb is not None and not sparse:
        raise ConfigError("--budget-mb has no part without --sparse: leave it out", param="--budget-mb")
    if budget_mb is not None and not 0 < budget_mb < 1e6:
        raise ConfigError(f"--budget-mb is {budget_mb:g}, but must be above 0", param="--budget-mb")
    levels = [None, *(Sparsity.parse(text, budget_mb or 0) for text in sparse)]
    return list(dict.fromkeys(_pairs([Format(), *map(Format.parse, formats)], levels)))


def _pairs(formats: Sequence[Format], levels: Sequence[Sparsity | None]) -> Iterator[Variant]:
    for level, stored in product(levels, formats):
        yield Variant(stored, level)
