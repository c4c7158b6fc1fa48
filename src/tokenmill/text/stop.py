"""Stop strings in a stream of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Cuts a stream of text where the first stop string ends, however the text is cut into pieces.

    The first is the one that ends first; of several that end together it is the longest. Held back is the longest
    tail that could still become a stop string, and no more.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        """`include` keeps the stop string itself in the text. Strings must not be empty."""
        self._automaton = _automaton(tuple(strings)) if strings else None
        self._include = include
        self._state = 0
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; return the text that is safe to show and whether a stop string ended it."""
        assert not self._stopped, "a stopped stream takes no more text"
        if self._automaton is None:
            return text, False
        whole = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.step(self._state, char)
            matched = self._automaton.match[self._state]
            if matched:
                self._stopped, self._held = True, ""
                return whole[: index if self._include else index - matched], True
        safe = len(whole) - self._automaton.depth[self._state]
        self._held = whole[safe:]
        return whole[:safe], False

    def flush(self) -> str:
        """The text still held back, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Aho and Corasick (1975): constant time per character, however many and however long the strings.

    A state is the longest tail of the text so far that begins some string; state 0 is the empty tail. `depth` is its
    length, `match` the length of the longest string that it ends with, 0 for none.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]
        self.depth = [0]
        self.match = [0]
        for string in strings:
            assert string, "an empty stop string ends everything"
            self._insert(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        while (after := self._next[state].get(char)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return after

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
            state = self._next[state][char]
        self.match[state] = len(string)

    def _link(self) -> None:
        """Point each state to the next shorter tail that also begins a string, shallow states first."""
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for char, after in self._next[state].items():
                self._shorter[after] = self.step(self._shorter[state], char)
                self.match[after] = self.match[after] or self.match[self._shorter[after]]
                todo.append(after)


@lru_cache(maxsize=64)
def _automaton(strings: tuple[str, ...]) -> _Automaton:
    """One for all choices of a request: it takes time and memory to make, and never changes."""
    return _Automaton(strings)
