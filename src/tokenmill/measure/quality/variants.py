"""The KV settings that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tokenmill.core.errors import ConfigError
from tokenmill.core.kv_spelling import Format, Sparsity, kv_settings


@dataclass(frozen=True)
class Variant:
    """One way of keeping KV. The first of a list is the reference: bf16, and whole. budget_mb: MiB of a request, if it is sparsified."""

    format: Format
    sparsity: Sparsity | None = None
    budget_mb: float | None = None

    @property
    def name(self) -> str:
        return self.format.name if self.sparsity is None else f"{self.format.name} {self.sparsity.name} of {self.budget_mb:g} MB"

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `EngineConfig` that make it so; the reference has none."""
        return kv_settings(self.format, self.sparsity, self.budget_mb)


REFERENCE = Variant(Format())


def parse_variants(formats: Sequence[str], sparse: Sequence[str], budget_mb: float | None) -> list[Variant]:
    """Every format whole and at every level, the reference first whether it is named or not. Raises `ConfigError`."""
    if sparse and budget_mb is None:
        raise ConfigError("--sparse needs --budget-mb: a request is sparsified when it has nearly used its budget", param="--budget-mb")
    if budget_mb is not None and not sparse:
        raise ConfigError("--budget-mb has no part without --sparse: leave it out", param="--budget-mb")
    if budget_mb is not None and not 0 < budget_mb < 1e6:
        raise ConfigError(f"--budget-mb is {budget_mb:g}, but must be above 0", param="--budget-mb")
    levels = [None, *map(Sparsity.parse, sparse)]
    return list(dict.fromkeys(_variants([Format(), *map(Format.parse, formats)], levels, budget_mb)))


def _variants(formats: Sequence[Format], levels: Sequence[Sparsity | None], budget_mb: float | None) -> Iterator[Variant]:
    for level, stored in product(levels, formats):
        yield Variant(stored, level, None if level is None else budget_mb)
