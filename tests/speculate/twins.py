"""What the proposers do, by definition: everything is searched for from the start, every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Strings = Sequence[Sequence[int]]

END = -1


def followers(strings: Strings, context: Sequence[int]) -> list[int]:
    """Every token that has followed `context`, oldest first."""
    size = len(context)
    return [s[i + size] for s in strings for i in range(len(s) - size) if list(s[i : i + size]) == list(context)]


def longest(strings: Strings, context: Sequence[int], depth: int) -> int:
    """Tokens of the longest suffix of `context` that something has followed."""
    return next((n for n in range(min(depth, len(context)), 0, -1) if followers(strings, context[-n:])), 0)


def commonest(tokens: Sequence[int]) -> tuple[int, int]:
    """The most frequent token, of equals the one that came last; and how often."""
    counts = Counter(tokens)
    most = max(counts.values())
    return next(t for t in reversed(tokens) if counts[t] == most), most


def suffix_draft(
    strings: Strings, context: Sequence[int], depth: int, most: int, floor: float, trust: Sequence[float]
) -> list[tuple[int, int, float]]:
    """Tokens with the lengths of their matches and their shares. All strings but the last are over."""
    strings = [*([*s, END] for s in strings[:-1]), strings[-1]]
    text, draft, odds = list(context)[-depth:], [], 1.0
    for _ in range(most):
        match = longest(strings, text, depth)
        if not match:
            break
        after = followers(strings, text[-match:])
        token, times = commonest(after)
        odds *= times / len(after) * trust[match]
        if token == END or (draft and odds < floor):
            break
        draft.append((token, match, times / len(after)))
        text.append(token)
    return draft


def ngram_draft(tokens: Sequence[int], sizes: Sequence[int], most: int) -> list[int]:
    """The continuation of the most recent earlier occurrence of the longest n-gram that ends `tokens`, as if it went on without end."""
    for size in sorted(sizes, reverse=True):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[-size:]):
                text = list(tokens)
                for _ in range(most):
                    text.append(text[len(text) - (len(tokens) - end)])
                return text[len(tokens) :]
    return []
