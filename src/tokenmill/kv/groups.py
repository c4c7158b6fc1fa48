"""KV groups: which (layer, KV head) pairs keep which positions.

All groups of a model have room for the same number of pairs, so that a frame of any of them is the same number of bytes and they
draw from one pool with one numbering. A rule with more pairs than that has several groups, which keep the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenmill.core.types import Pair, Streaming


@dataclass(frozen=True, slots=True)
class Whole:
    """Every position is kept and attended to."""


@dataclass(frozen=True, slots=True)
class Window:
    """A query at position p attends to positions (p - tokens, p]."""

    tokens: int

    def __post_init__(self) -> None:
        assert self.tokens >= 1, f"a window of {self.tokens} tokens"


Retention = Whole | Window | Streaming


@dataclass(frozen=True, slots=True)
class KVGroup:
    """KV heads under one retention rule."""

    name: str
    retention: Retention
    pairs: tuple[Pair, ...]


def check_groups(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """Return the groups as a tuple, having asserted that none is empty, that names are unique and that no pair is in two groups."""
    names = [group.name for group in groups]
    pairs = [pair for group in groups for pair in group.pairs]
    assert groups, "the model has no KV group"
    assert all(group.pairs for group in groups), "a KV group has no pair"
    assert len(set(names)) == len(names), f"KV group names repeat: {names}"
    assert len(set(pairs)) == len(pairs), f"a pair is in two KV groups: {pairs}"
    assert len({group.retention for group in groups if isinstance(group.retention, Streaming)}) <= 1, "two streaming rules"
    return tuple(groups)


def divide(rules: Mapping[Retention, Sequence[Pair]], waste: float = 0.03) -> tuple[KVGroup, ...]:
    """Cut the pairs of each rule into groups of equal room: as few groups as waste at most that share of all pairs.

    Wasted are the empty places of groups that are not full, and pairs of a `Streaming` rule that are kept whole so that its
    groups are full: the first ones, so the caller lists them in the order in which they deserve it.
    """
    total = sum(len(pairs) for pairs in rules.values())
    assert total, "the model has no KV head"
    candidates = (candidate for room in range(1, total + 1) for candidate in _candidates(rules, room))
    return min(candidates, key=lambda candidate: candidate.cost(total * waste)).groups


@dataclass(frozen=True, slots=True)
class _Candidate:
    groups: tuple[KVGroup, ...]
    wasted: int

    def cost(self, allowed: float) -> tuple[bool, int, int]:
        return self.wasted > allowed, len(self.groups), self.wasted


def _candidates(rules: Mapping[Retention, Sequence[Pair]], room: int) -> list[_Candidate]:
    streaming = next((rule for rule in rules if isinstance(rule, Streaming)), None)
    surplus = len(rules[streaming]) % room if streaming is not None else 0
    found = []
    for moved in {0, surplus}:
        pairs = {rule: list(of_rule) for rule, of_rule in rules.items()}
        if streaming is not None and moved:
            pairs.setdefault(Whole(), []).extend(pairs[streaming][:moved])
            del pairs[streaming][:moved]
        for of_rule in pairs.values():
            of_rule.sort()
        groups = tuple(
            KVGroup(_name(rule, at // room), rule, tuple(of_rule[at : at + room]))
            for rule, of_rule in sorted(pairs.items(), key=lambda item: _order(item[0]))
            for at in range(0, len(of_rule), room)
        )
        found.append(_Candidate(groups, len(groups) * room - sum(len(of_rule) for of_rule in pairs.values()) + moved))
    return found


def _order(rule: Retention) -> tuple[int, int]:
    if isinstance(rule, Window):
        return 2, rule.tokens
    return (1, 0) if isinstance(rule, Streaming) else (0, 0)


def _name(rule: Retention, number: int) -> str:
    kind = f"window {rule.tokens}" if isinstance(rule, Window) else type(rule).__name__.lower()
    return f"{kind} {number}"
