"""Suffix decoding (Oliaro et al., "SuffixDecoding", 2024): what mostly followed the longest known suffix of the context,

in the sequence itself and in what others have put out before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tokenmill._native import SuffixDraft, SuffixIndex
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.odds import LONGEST, Odds, Promise, Track
from tokenmill.speculate.proposer import Wish, Worth

NAMESPACE_TOKENS = 16
"""What a namespace is counted for beside its tokens, so that many small ones are bounded too."""


class EarlierOutputs:
    """Outputs of sequences that are over, in two generations: when the younger is full the older is dropped, whole.

    Namespaces share the room, and nothing else.
    """

    def __init__(self, room: int) -> None:
        """room: tokens at most, of all namespaces together."""
        self._room = room // 2
        self._used = 0
        self._young: dict[str, SuffixIndex] = {}
        self._old: dict[str, SuffixIndex] = {}

    def indexes(self, namespace: str) -> list[SuffixIndex]:
        """Those that may be asked in this namespace, the youngest first."""
        return [found[namespace] for found in (self._young, self._old) if namespace in found]

    def add(self, namespace: str, output: list[int]) -> None:
        output = output[: max(self._room - NAMESPACE_TOKENS, 0)]
        if not output:
            return
        cost = len(output) + (0 if namespace in self._young else NAMESPACE_TOKENS)
        if self._used + cost > self._room:
            self._young, self._old = {}, self._young
            self._used, cost = 0, len(output) + NAMESPACE_TOKENS
        self._used += cost
        index = self._young.setdefault(namespace, SuffixIndex(LONGEST))
        index.extend(output)
        index.end()


@dataclass(slots=True)
class _Known:
    """A sequence. token_ids: the caller's own list, which is whole when the sequence is over. indexed: how many of them."""

    token_ids: list[int]
    prompt_len: int
    namespace: str
    track: Track
    index: SuffixIndex = field(default_factory=lambda: SuffixIndex(LONGEST))
    indexed: int = 0


class SuffixProposer:
    """Looks up the sequence itself and earlier outputs, and takes what promises most tokens."""

    name = "suffix"
    writes = False
    invested = 0.0

    def __init__(self, room: int) -> None:
        """room: tokens of earlier outputs to keep."""
        self._common = Odds()
        self._earlier = EarlierOutputs(room)
        self._sequences: dict[Hashable, _Known] = {}

    def propose(self, wishes: Sequence[Wish], worth: Worth) -> list[Draft]:
        floor = worth.floor(max((wish.most for wish in wishes), default=0))
        return [self._draft(wish, floor) for wish in wishes]

    def forget(self, key: Hashable) -> None:
        """What the sequence has put out (of what has no room, the beginning) is proposed to others of its namespace from now on."""
        known = self._sequences.pop(key, None)
        if known is not None:
            self._earlier.add(known.namespace, known.token_ids[known.prompt_len :])

    def _draft(self, wish: Wish, floor: float) -> Draft:
        known = self._catch_up(wish)
        tokens, trust = wish.token_ids, known.track.trust
        context, most = tokens[-LONGEST:], max(wish.most, 1)
        best: SuffixDraft | None = None
        for index in chain((known.index,), self._earlier.indexes(wish.namespace)):
            draft = index.draft(context, most, floor, trust)
            if best is None or draft.expected > best.expected:
                best = draft
        assert best is not None, "a sequence has an index of its own"
        promises = [Promise(*p) for p in zip(best.tokens, best.matches, best.shares, strict=True)]
        known.track.promise(len(tokens), promises)
        odds = tuple(p.share * float(trust[p.match]) for p in promises[: wish.most])
        if not odds or odds[0] < floor:  # the first token is checked all the same, or its odds would stay low for good
            return Draft()
        return Draft(tuple(best.tokens[: wish.most]), odds)

    def _catch_up(self, wish: Wish) -> _Known:
        known = self._sequences.get(wish.key)
        if known is None:
            known = _Known(wish.token_ids, wish.prompt_len, wish.namespace, Track(self._common))
            self._sequences[wish.key] = known
        known.token_ids = wish.token_ids
        known.index.extend(wish.token_ids[known.indexed :])
        known.indexed = len(wish.token_ids)
        known.track.check(wish.token_ids)
        return known
