"""A store on a server that speaks Valkey's protocol: Valkey, Redis, Dragonfly. Of the server's configuration nothing is touched: an entry
has a time to live, and what the server does when it is full is its own affair."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from valkey.exceptions import InvalidResponse

from tokenmill.core.clock import MonotonicClock
from tokenmill.transfer.store.address import Address
from tokenmill.transfer.store.breaker import Breaker
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.entry import Data
from tokenmill.transfer.store.link import NO_ROOM, Command, Link, LinkPolicy
from tokenmill.transfer.store.protocol import Refusal

log = logging.getLogger(__name__)

PREFIX = b"tokenmill:kv:"
"""What all keys on a server begin with; the block's key follows in hexadecimal."""

_MOST_KEYS = 256
"""In one exchange."""

T = TypeVar("T")
Sane: TypeAlias = Callable[[Any], bool]
"""Whether an answer is one that there can be to a command."""


class RemotePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """ttl: seconds that an entry lives after it was last put. at_once: bytes of entries that are sent together."""

    ttl: int = 3600
    at_once: int = 8 << 20
    link: LinkPolicy = LinkPolicy()


class RemoteStore:
    """A `Store` (tiers.py), for any thread. entry_bytes: of the longest entry."""

    def __init__(self, address: Address, entry_bytes: int, counts: Counts, policy: RemotePolicy | None = None) -> None:
        self._policy = policy = policy or RemotePolicy()
        self._entry_bytes = entry_bytes
        self._counts = counts
        self._link = Link(address, counts, policy.link)
        # A server that is full, or a replica, refuses to keep: that is no reason not to read from it.
        self._keeping = Breaker(MonotonicClock(), policy.link.backoff)

    @property
    def up(self) -> bool:
        """Whether the server is spoken to."""
        return self._link.up

    def find(self, keys: Sequence[bytes]) -> int:
        found = 0
        for names in _batches([_name(key) for key in keys], _MOST_KEYS):
            there = self._ask([("EXISTS", name) for name in names], _is_number)
            leading = _leading(there, lambda answer: answer == 1)
            found += leading
            if leading < len(names):
                break
        return found

    def get(self, keys: Sequence[bytes], room: memoryview) -> list[memoryview]:
        entries: list[memoryview] = []
        while len(entries) < len(keys) and room:
            # One answer for all that fit, so that all together have its timeout.
            count = max(1, min(_MOST_KEYS, len(room) // self._entry_bytes))
            batch = keys[len(entries) : len(entries) + count]
            (values,) = self._ask([("MGET", *map(_name, batch))], functools.partial(_is_values, len(batch)), room) or [[]]
            leading = _leading(values, lambda value: isinstance(value, memoryview))
            entries += values[:leading]
            room = room[sum(map(len, values[:leading])) :]
            if leading < len(batch):
                break
        self._counts.add(Count.REMOTE_HITS, len(entries))
        return entries

    def put(self, entries: Sequence[tuple[bytes, Data]]) -> list[bool]:
        """Entries that the server has already live for `ttl` from now on, and are not sent again."""
        kept: list[bool] = []
        for batch in _batches(entries, max(1, self._policy.at_once // self._entry_bytes)):
            if self._link.up and self._keeping.admits():
                kept += self._put(batch)
            else:
                self._counts.add(Count.REMOTE_REFUSED, len(batch))
                kept += [False] * len(batch)
        return kept

    def discard(self, keys: Sequence[bytes]) -> None:
        for names in _batches([_name(key) for key in keys], _MOST_KEYS):
            self._link.exchange([("UNLINK", name) for name in names])

    def close(self) -> None:
        """When no other thread uses it any more."""
        self._link.close()

    def _ask(self, commands: Sequence[Command], sane: Sane, room: memoryview = NO_ROOM) -> list[Any]:
        """The answers; none when the server fails, or refuses one: who may not read has no use for it."""
        answers = self._exchange(commands, sane, room) or []
        refusal = next((answer for answer in answers if isinstance(answer, Refusal)), None)
        if refusal is None:
            return answers
        self._link.failed(refusal)
        return []

    def _exchange(self, commands: Sequence[Command], sane: Sane, room: memoryview = NO_ROOM) -> list[Any] | None:
        """Answers to each, sane ones and refusals; None when the server fails."""
        answers = self._link.exchange(commands, room) or []
        for command, answer in zip(commands, answers, strict=False):
            if not (sane(answer) or isinstance(answer, Refusal)):
                self._link.failed(InvalidResponse(f"{str(answer)[:32]} is no answer to {command[0]!s}"))
                return None
        return answers or None

    def _put(self, entries: Sequence[tuple[bytes, Data]]) -> list[bool]:
        """Of entries that fit into one exchange, whether each is there."""
        ttl = self._policy.ttl
        named = [(_name(key), entry) for key, entry in entries]
        # EXPIRE says 1 where there is something, and 0 otherwise.
        answers = self._exchange([("EXPIRE", name, ttl) for name, _ in named], _is_number)
        missing = [number for number, answer in enumerate(answers or ()) if answer == 0]
        if answers is not None and missing:
            sent = self._exchange([("SET", *named[number], "EX", ttl) for number in missing], lambda answer: answer == b"OK")
            if sent is None:
                answers = None
            else:
                for number, answer in zip(missing, sent, strict=True):
                    answers[number] = answer
        if answers is None:
            if not self._keeping.closed:
                self._keeping.failed()  # this was its try
            return [False] * len(entries)
        refusals = [answer for answer in answers if isinstance(answer, Refusal)]
        self._counts.add(Count.REMOTE_REFUSED, len(refusals))
        if not refusals:
            self._keeping.succeeded()
        elif self._keeping.failed() == 1:
            log.warning("the KV store at %s keeps nothing new: %s", self._link.shown, refusals[0])
        return [not isinstance(answer, Refusal) for answer in answers]


def _is_number(answer: Any) -> bool:
    return isinstance(answer, int)


def _is_values(count: int, answer: Any) -> bool:
    if not isinstance(answer, list) or len(answer) != count:
        return False
    return all(value is None or value == b"" or isinstance(value, memoryview) for value in answer)


def _leading(answers: Sequence[Any], good: Callable[[Any], bool]) -> int:
    return next((number for number, answer in enumerate(answers) if not good(answer)), len(answers))


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _name(key: bytes) -> bytes:
    return PREFIX + key.hex().encode()
