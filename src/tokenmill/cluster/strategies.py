"""Whom to give a request to, of those who can take it. Each strategy is one small class over plain loads.

A pool has at least one load. Where a strategy finds several equally good it takes the one that was chosen longest ago. All but
`round_robin` put workers without room (no free row in a batch, or too little KV) behind those with room, whatever else speaks for them.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tokenmill.cluster.load import Load
from tokenmill.cluster.prefixes import PrefixIndex
from tokenmill.core.blocks import BLOCK
from tokenmill.core.errors import ConfigError
from tokenmill.core.roles import Role


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request when a worker is sought.

    max_tokens: of its output. hashes: of its prompt's blocks (core/blocks.py), under the fingerprint of the model's workers. session:
    requests with the same one follow each other in one conversation. fingerprint: only workers with this one, as a hand-over needs.
    """

    model: str
    prompt_tokens: int
    max_tokens: int = 1
    hashes: Sequence[bytes] = ()
    session: str | None = None
    fingerprint: str | None = None

    @property
    def longest(self) -> int:
        """Tokens of prompt and output at most."""
        return self.prompt_tokens + self.max_tokens


class Strategy(Protocol):
    """turns: by worker id, a number that is larger the later it was last chosen; who is missing never was."""

    def pick(self, pool: Sequence[Load], request: RouteRequest, wanted: Role, turns: Mapping[str, int]) -> Load: ...


class MinDecodeQueue:
    """The fewest streams; for prompts alone, the fewest prompt tokens ahead of it. Of equals the fewest tokens, or streams."""

    def pick(self, pool: Sequence[Load], request: RouteRequest, wanted: Role, turns: Mapping[str, int]) -> Load:
        return _shortest_queue(pool, request, wanted, turns)


class LeastTokens:
    """The fewest tokens to take care of: prompt tokens still to be computed, and positions in the KV pool."""

    def pick(self, pool: Sequence[Load], request: RouteRequest, wanted: Role, turns: Mapping[str, int]) -> Load:
        pool = _with_room(pool, request.prompt_tokens)
        pool = _least(pool, [load.queued_prompt_tokens + load.kv_tokens for load in pool])
        return _longest_ago(pool, turns)


class PrefixAware:
    """The fewest prompt tokens that must be computed until this prompt is: those ahead of it and those of it that the worker does not
    have. So a worker that knows the prefix is given requests until its lead is used up by what waits there, and a hot prefix spreads.

    tokens_per_stream: as many prompt tokens does a stream count for, since steps are longer by its rows.
    """

    def __init__(self, prefixes: PrefixIndex, tokens_per_stream: int) -> None:
        self._prefixes = prefixes
        self._tokens_per_stream = tokens_per_stream

    def pick(self, pool: Sequence[Load], request: RouteRequest, wanted: Role, turns: Mapping[str, int]) -> Load:
        depth, weight, tokens = self._prefixes.depths(request.hashes).get, self._tokens_per_stream, request.prompt_tokens
        missing = [tokens - BLOCK * depth(load.worker.id, 0) for load in pool] if request.hashes else [tokens] * len(pool)
        costs = [
            load.queued_prompt_tokens
            + weight * load.streams
            + needed
            # `Load.lacks_room`, spelled out
            + _NO_ROOM * (load.sequences >= load.worker.max_batch_size or load.kv_tokens + needed > load.worker.kv_tokens)
            for load, needed in zip(pool, missing, strict=True)
        ]
        return _longest_ago(_least(pool, costs), turns)


class PowerOfTwo:
    """Two drawn at random, of which the one with the shorter queue: nearly as even as looking at all, and several gateways that know
    equally little of each other do not all run to the same worker (Mitzenmacher 2001)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, pool: Sequence[Load], request: RouteRequest, wanted: Role, turns: Mapping[str, int]) -> Load:
        return _shortest_queue(self._random.sample(pool, min(2, len(pool))), request, wanted, turns)


class RoundRobin:
    """By turns, whatever the load. Who has just come or come back has one turn at once, and no more than the others after it."""

    def pick(self, pool: Sequence[Load], request: RouteRequest, wanted: Role, turns: Mapping[str, int]) -> Load:
        return _longest_ago(pool, turns)


STRATEGIES: dict[str, Callable[[PrefixIndex, int, int], Strategy]] = {
    "min_decode_queue": lambda prefixes, tokens_per_stream, seed: MinDecodeQueue(),
    "least_tokens": lambda prefixes, tokens_per_stream, seed: LeastTokens(),
    "prefix_aware": lambda prefixes, tokens_per_stream, seed: PrefixAware(prefixes, tokens_per_stream),
    "power_of_two": lambda prefixes, tokens_per_stream, seed: PowerOfTwo(seed),
    "round_robin": lambda prefixes, tokens_per_stream, seed: RoundRobin(),
}


def build_strategy(name: str, prefixes: PrefixIndex, tokens_per_stream: int, seed: int) -> Strategy:
    """Raises `ConfigError` for an unknown name, naming the nearest."""
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known strategies: {', '.join(STRATEGIES)}"
        raise ConfigError(f"unknown routing_strategy {name!r}: {hint}", param="routing_strategy")
    return STRATEGIES[name](prefixes, tokens_per_stream, seed)


def _shortest_queue(pool: Sequence[Load], request: RouteRequest, wanted: Role, turns: Mapping[str, int]) -> Load:
    pool = _with_room(pool, request.prompt_tokens)
    if wanted is Role.PREFILL:
        pool = _least(pool, [load.queued_prompt_tokens for load in pool])
        pool = _least(pool, [load.streams for load in pool])
    else:
        pool = _least(pool, [load.streams for load in pool])
        pool = _least(pool, [load.queued_prompt_tokens + load.kv_tokens for load in pool])
    return _longest_ago(pool, turns)


_NO_ROOM = 1 << 60

# In passes over lists, each of which leaves fewer: about a fifth of the time that keys made in a function take.


def _with_room(pool: Sequence[Load], tokens: int) -> Sequence[Load]:
    """`Load.lacks_room` of each, spelled out; all, if none has room."""
    return [
        load for load in pool if load.sequences < load.worker.max_batch_size and load.kv_tokens + tokens <= load.worker.kv_tokens
    ] or pool


def _least(pool: Sequence[Load], values: list[int]) -> Sequence[Load]:
    lowest = min(values)
    return [load for load, value in zip(pool, values, strict=True) if value == lowest]


def _longest_ago(pool: Sequence[Load], turns: Mapping[str, int]) -> Load:
    return min(pool, key=lambda load: turns.get(load.worker.id, 0))
