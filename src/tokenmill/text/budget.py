"""What one rendering of a template may use, and the account of it.

A template comes with the model file and may be hostile: loops in loops, a string doubled forty times, a list that
holds itself twice, forty levels deep. A thread cannot be killed, so every operation that can repeat or grow pays
before it runs: `step` for each loop turn, call and filter, `size` for what it makes, `weigh` for a value about to be
walked as a whole. No single paid operation takes long, so the time, looked at in each step, is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MappingView, Sized
from typing import Any, TypeVar, cast

import msgspec
from jinja2 import TemplateRuntimeError, Undefined

T = TypeVar("T")

_ENTRY = 64
"""What an entry of a list counts, in characters."""


class BudgetExceeded(TemplateRuntimeError):
    """The template asked for more than a rendering may use."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a rendering may use, before the allowance for the size of its messages.

    seconds: processor time of the thread. steps: loop turns, calls, filters and values walked. largest: characters
    of one value and of the prompt. total: characters of all values made, whether kept or not.
    """

    seconds: float = 0.5
    steps: int = 200_000
    largest: int = 4 << 20
    total: int = 64 << 20


class Budget:
    """The account of one rendering, whose messages have `given` characters and entries."""

    def __init__(self, limits: Limits, given: int) -> None:
        self._seconds = limits.seconds + given * 1e-6
        self._steps = limits.steps + 4 * given
        self._total = limits.total + 16 * given
        self._largest = limits.largest + 4 * given
        self._end = time.thread_time() + self._seconds

    def step(self, count: int = 1) -> None:
        """Pay for a repetition or a call."""
        self._steps -= count
        if self._steps < 0:
            raise BudgetExceeded("it takes too many steps")
        if time.thread_time() > self._end:
            raise BudgetExceeded(f"it takes longer than {self._seconds:.1f} s")

    def size(self, characters: int) -> None:
        """Pay for a value before it is made."""
        if characters > self._largest:
            raise BudgetExceeded(f"it makes a value of {characters} characters, and {self._largest} are allowed")
        self._total -= characters
        if self._total < 0:
            raise BudgetExceeded("it makes too much text in total")

    def entries(self, count: int) -> None:
        """Pay for a list of so many entries."""
        self.size(count * _ENTRY)

    def made(self, value: T) -> T:
        """Pay for a value whose making was cheap; returns it."""
        if isinstance(value, str):
            self.size(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.entries(len(value))
        return value

    def weigh(self, value: Any, indent: int = 0) -> int:
        """Walk a value; return a bound for its length in print.

        Raises for what is no plain data, as the text of other things is neither bounded nor meaningful.
        """
        return weigh(value, self.step, indent)

    def each(self, values: Iterable[T]) -> Iterator[T]:
        """Pay for each entry as it is taken."""
        for value in values:
            self.step()
            yield value

    def to_list(self, values: Iterable[T]) -> list[T]:
        """A list that is paid for as it grows."""
        if isinstance(values, Sized):
            self.entries(len(values))
            return list(values)
        taken: list[T] = []
        for value in self.each(values):
            self.size(_ENTRY)
            taken.append(value)
        return taken


def weigh(value: Any, step: Callable[[int], None], indent: int = 0, depth: int = 1) -> int:
    """A bound for the printed length of plain data in characters; `step` is told how many values are walked."""
    if isinstance(value, str):
        return len(value) + 2
    if value is None or isinstance(value, (bool, int, float, Undefined)):
        return 32
    if isinstance(value, Mapping):
        values: Collection[Any] = [part for pair in value.items() for part in pair]
    elif isinstance(value, (list, tuple, MappingView)):
        values = cast(Collection[Any], value)
    else:
        raise TemplateRuntimeError(f"a {type(value).__name__} cannot be used as text or data")
    step(1 + len(values))
    return 2 + sum(4 + indent * depth + weigh(part, step, indent, depth + 1) for part in values)
