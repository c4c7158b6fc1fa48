"""KV groups: which (layer, KV head) pairs keep which positions.

All groups of a model share one pool for now, so a frame number stands for the same 8 positions in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Whole:
    """Every position is kept and attended to."""


@dataclass(frozen=True, slots=True)
class Window:
    """A query at position p attends to positions (p - tokens, p]."""

    tokens: int

    def __post_init__(self) -> None:
        assert self.tokens >= 1, f"a window of {self.tokens} tokens"


Retention = Whole | Window


@dataclass(frozen=True, slots=True)
class KVGroup:
    """All KV heads of `layers`, under one retention rule."""

    name: str
    retention: Retention
    layers: tuple[int, ...]


def check_groups(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """Return the groups as a tuple, having asserted that names are unique and that no layer is in two groups."""
    names = [group.name for group in groups]
    layers = [layer for group in groups for layer in group.layers]
    assert layers, "the model has no KV group with a layer"
    assert len(set(names)) == len(names), f"KV group names repeat: {names}"
    assert len(set(layers)) == len(layers), f"a layer is in two KV groups: {layers}"
    return tuple(groups)
