"""What an engine's KV cache is like: how bytes are kept, which heads share page tables, and what goes when a budget is used up.

Pure decisions from the settings, the model's shape and its calibration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tokenmill.core.config import CompressionConfig, EngineConfig
from tokenmill.core.errors import ConfigError, InvalidRequest, KVBudgetTooSmall
from tokenmill.core.kv_spelling import at_least
from tokenmill.core.types import Pair, Strategy, Streaming
from tokenmill.kernels.layout import KVFormat, KVLayout
from tokenmill.kernels.ops import Program
from tokenmill.kv.budget import SparsePolicy
from tokenmill.kv.groups import KVGroup, Retention, Whole, Window, divide
from tokenmill.models.calibration import STREAMING, Calibration
from tokenmill.models.config import ModelConfig


class CacheDesign(NamedTuple):
    """`layout` has the same groups as `groups`, for the kernels. identity: of all that decides what a frame's bytes are and mean."""

    groups: tuple[KVGroup, ...]
    layout: KVLayout
    policy: SparsePolicy
    identity: str


class RequestBudget(NamedTuple):
    """Bytes. frame_bytes: of one frame in the pool. least: of the smallest sequence. most: that a request may have, or None."""

    frame_bytes: int
    least: int
    most: int | None

    @classmethod
    def of(cls, config: EngineConfig, frame_bytes: int, n_groups: int) -> RequestBudget:
        """Raises `ConfigError` for a budget in which nothing fits."""
        gigabytes, least = config.kv_cache_config.per_request_budget_gb, frame_bytes * n_groups
        if gigabytes is None:
            return cls(frame_bytes, least, None)
        most = int(gigabytes * 2**30)
        if most < least:
            raise ConfigError(
                f"per_request_budget_gb is {gigabytes}, but the smallest sequence takes {least} bytes: raise it to "
                f"{at_least(least / 2**30, 9)} (--kv-budget-mb {at_least(least / 2**20)})",
                param="per_request_budget_gb",
            )
        return cls(frame_bytes, least, most)

    def frames(self, megabytes: float | None) -> int | None:
        """Of a request that asks for `megabytes` (MiB). Raises `InvalidRequest` for more than there is for one, `KVBudgetTooSmall` for
        less than anything takes."""
        if megabytes is None:
            return None if self.most is None else self.most // self.frame_bytes
        wanted = int(megabytes * 2**20)
        if self.most is not None and wanted > self.most:
            raise InvalidRequest(
                f"kv_budget_mb is {megabytes:g}, but a request may have {self.most / 2**20:g} here: lower it or leave it out",
                param="kv_budget_mb",
            )
        if wanted < self.least:
            raise KVBudgetTooSmall(
                f"kv_budget_mb is {megabytes:g}, but the smallest sequence takes {at_least(self.least / 2**20)} MB: raise it",
                param="kv_budget_mb",
            )
        return wanted // self.frame_bytes


def needs_calibration(config: EngineConfig) -> bool:
    """Whether the settings ask for what `tokenmill calibrate` finds."""
    return _calibrates_keys(config) or _strategy(config) == "topk_heads"


def design_cache(config: EngineConfig, model: ModelConfig, calibration: Calibration | None) -> CacheDesign:
    """calibration: the model's own, if it `needs_calibration`."""
    stored = kv_format(config.kv_cache_config.compression, model.shape.head_dim)
    sparse = config.attention_config.sparse_attention
    policy = SparsePolicy(_strategy(config), sparse.trigger_threshold, sparse.keep_ratio, STREAMING.sinks)
    identity = f"{stored} {config.kv_cache_config.per_request_budget_gb} {policy}" if policy.strategy != "none" else str(stored)
    rules = _rules(model)
    if policy.strategy == "topk_heads":
        assert calibration is not None, "topk_heads needs the heads' profile"
        whole, streaming = calibration.divide(rules.pop(Whole(), []), sparse.keep_ratio)
        rules |= {rule: pairs for rule, pairs in ((Whole(), whole), (STREAMING, streaming)) if pairs}
        identity += f" heads of {calibration.digest}"
    keys = None
    if _calibrates_keys(config):
        assert calibration is not None, "keys are scaled by a calibration"
        keys = calibration.keys
        identity += f" keys of {calibration.digest}"
    groups = divide(rules)
    masks = tuple(STREAMING if isinstance(group.retention, Streaming) else None for group in groups)
    return CacheDesign(groups, KVLayout(stored, tuple(group.pairs for group in groups), masks, keys), policy, identity)


def draft_layout(config: EngineConfig, program: Program, calibration: Callable[[], Calibration]) -> KVLayout:
    """Of a draft model: the target's format, all in one group. calibration: finds the draft model's own."""
    stored = kv_format(config.kv_cache_config.compression, program.shape.head_dim)
    layout = KVLayout.single(program, stored)
    return replace(layout, calibration=calibration().keys) if _calibrates_keys(config) else layout


def kv_format(compression: CompressionConfig, head_dim: int) -> KVFormat:
    """As the kernels know it; a group is a head at most."""
    if not compression.enabled:
        return KVFormat()
    return KVFormat(compression.key_dtype, compression.value_dtype, min(compression.group_size, -(-head_dim // 32) * 32))


def _rules(model: ModelConfig) -> dict[Retention, list[Pair]]:
    """KV heads of layers that keep everything, and those of each window."""
    rules: dict[Retention, list[Pair]] = {}
    for number, layer in enumerate(model.layers):
        rule = Whole() if layer.window is None else Window(layer.window)
        rules.setdefault(rule, []).extend((number, head) for head in range(model.shape.kv_heads))
    return rules


def _strategy(config: EngineConfig) -> Strategy:
    sparse = config.attention_config.sparse_attention
    return sparse.strategy if sparse.enabled else "none"


def _calibrates_keys(config: EngineConfig) -> bool:
    compression = config.kv_cache_config.compression
    return compression.enabled and compression.key_dtype != "bf16" and compression.calibration_method == "minmax"
