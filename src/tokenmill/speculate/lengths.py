"""How much of each draft is worth verifying in a step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush


def choose_lengths(odds: Sequence[Sequence[float]], rows: int, seconds: Callable[[int], float], margin: float = 0.0) -> list[int]:
    """How many tokens of each draft to verify, so that the step gives the most tokens per second.

    odds: per draft, the probability that each token is right, given that those before it are; drafts of sequences that all give one
    token in any case. rows: of the step without drafts. seconds: of a step by its rows. margin: share by which the rate must be above
    that without drafts.

    Tokens are taken in the order of the probability that they are reached and right, which within a draft only falls, and the best
    place to stop is searched over all of that order, since steps of some numbers of rows cost more than those around them.
    """
    lengths = [0] * len(odds)
    heap = [(-each[0], number) for number, each in enumerate(odds) if each]
    heapify(heap)
    base = max(1, len(odds))
    best_rate = (1 + margin) * base / seconds(rows)
    best = 0
    taken: list[int] = []
    expected = float(base)
    while heap:
        chance, number = heappop(heap)
        expected -= chance
        taken.append(number)
        lengths[number] += 1
        if lengths[number] < len(odds[number]):
            heappush(heap, (chance * odds[number][lengths[number]], number))
        rate = expected / seconds(rows + len(taken))
        if rate > best_rate:
            best_rate, best = rate, len(taken)
    for number in taken[best:]:
        lengths[number] -= 1
    return lengths
