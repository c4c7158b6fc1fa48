"""Prompt look-up (Saxena, "Prompt Lookup Decoding", 2023): what followed when the newest tokens last stood like this."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tokenmill.speculate.draft import Draft
from tokenmill.speculate.odds import LONGEST, Odds, Promise, Track
from tokenmill.speculate.proposer import Wish, Worth

SIZES = (2, 3, 4)
"""Tokens of the n-grams that are looked up, the longest first to be tried."""


class NGramIndex:
    """Where each n-gram of one sequence was last followed by something. Three dictionary entries a token, about 320 bytes."""

    def __init__(self) -> None:
        self._after: dict[int, dict[int, int]] = {size: {} for size in SIZES}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """tokens: all of the sequence; the newest n-grams, which nothing follows yet, stay out."""
        end = len(tokens) - 1
        if end <= self._indexed:
            return
        for size, after in self._after.items():
            start = max(self._indexed + 1 - size, 0)  # of the first n-gram that is new
            fresh = tokens[start:end]
            grams = zip(*(fresh[i:] for i in range(size)), strict=False)
            # By hash, which is a third of the tuples' memory; what is found is compared.
            after.update(zip(map(hash, grams), range(start + size, end + 1), strict=False))
        self._indexed = end

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the longest n-gram that ends `tokens` was last followed by something, and how many tokens before it are the same.

        (0, 0) if there is none.
        """
        for size in reversed(SIZES):
            if len(tokens) <= size:
                continue
            place = self._after[size].get(hash(tuple(tokens[-size:])), 0)
            if place and tokens[place - size : place] == tokens[-size:]:
                match = size
                while match < min(place, LONGEST) and tokens[place - 1 - match] == tokens[-1 - match]:
                    match += 1
                return place, match
        return 0, 0


class NGramProposer:
    """Looks up prompt and output of the sequence itself."""

    name = "ngram"
    writes = False
    invested = 0.0

    def __init__(self) -> None:
        self._common = Odds()
        self._sequences: dict[Hashable, tuple[NGramIndex, Track]] = {}

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        floor = worth.floor(max((wish.most for wish in wishes), default=0))
        return [self._draft(wish, floor) for wish in wishes]

    def forget(self, key: Hashable) -> None:
        self._sequences.pop(key, None)

    def _draft(self, wish: Wish, floor: float) -> Draft:
        if wish.key not in self._sequences:
            self._sequences[wish.key] = NGramIndex(), Track(self._common)
        index, track = self._sequences[wish.key]
        tokens = wish.token_ids
        index.extend(tokens)
        track.check(tokens)
        place, match = index.find(tokens)
        if not place:
            return Draft()
        period = len(tokens) - place  # a continuation that reaches the end goes on with itself
        trust = track.trust.tolist()
        promises, odds, all_right = [], [], 1.0
        for i in range(max(wish.most, 1)):
            length = min(match + i, LONGEST)
            all_right *= trust[length]
            if i and all_right < floor:
                break
            promises.append(Promise(tokens[place + i % period], length, 1.0))
            odds.append(trust[length])
        track.promise(len(tokens), promises)
        most = wish.most if odds[0] >= floor else 0  # the first token is checked all the same, or its odds would stay low for good
        return Draft(tuple(p.token for p in promises[:most]), tuple(odds[:most]))
