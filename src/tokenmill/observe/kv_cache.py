"""What is told of the KV cache: by `get_kv_cache_stats` in Python, and under /metrics."""

from __future__ import annotations

from typing import Any

from tokenmill.core.messages import EngineInfo, PageCounts, Stats
from tokenmill.core.types import FRAME

GB = 2**30
"""As in `memory_budget_gb`."""


def kv_cache_stats(info: EngineInfo, stats: Stats) -> dict[str, Any]:
    """Sizes, states, savings and events, as docs/kv-cache.md says. Frames, pages, bytes and sequences, but for `*_gb` (of 2**30
    bytes) and shares between 0 and 1."""
    pages = {size: _by_state(counts) for size, counts in stats.kv_pages.items()}
    frames = {"total": stats.kv_total, "free": stats.kv_free, "used": stats.kv_held, "cached": stats.kv_cached, "shared": stats.kv_shared}
    by_sharing = stats.kv_saved * stats.kv_frame_bytes
    saved_per_byte = info.kv_bytes_saved_per_token / info.kv_bytes_per_token
    by_compression = (stats.kv_held + stats.kv_cached) * stats.kv_frame_bytes * saved_per_byte
    held = stats.kv_held * FRAME
    return {
        **{f"{state}_pages": sum(of_size[state] for of_size in pages.values()) for state in frames},
        "pages_by_size": pages,
        **{f"{state}_frames": count for state, count in frames.items()},
        "bytes_per_token": info.kv_bytes_per_token,
        "bytes_by_format": {
            info.kv_format: {"per_token": info.kv_bytes_per_token} | {s: n * stats.kv_frame_bytes for s, n in frames.items()}
        },
        "saved_memory_gb": (by_sharing + by_compression) / GB,
        "saved_by_sharing_gb": by_sharing / GB,
        "saved_by_compression_gb": by_compression / GB,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "hit_rate": stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        "evictions": stats.evictions,
        "preemptions": stats.preemptions,
        "fragmentation": stats.kv_unfilled / held if held else 0.0,
        "budget_events": {
            "sparsified": stats.kv_sparsified,
            "dropped_frames": stats.kv_dropped,
            "ended": stats.kv_ended,
            "refused": stats.kv_refused,
        },
    }


def _by_state(counts: PageCounts) -> dict[str, int]:
    total = counts.free + counts.used + counts.cached
    return {"total": total, "free": counts.free, "used": counts.used, "cached": counts.cached, "shared": counts.shared}
