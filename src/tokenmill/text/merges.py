"""Ranked merges from SentencePiece scores.

SentencePiece joins, again and again, the two neighbours whose joined piece has the best score, leftmost first. What
it does inside a stretch of text that ends up as one piece does not depend on the text around: it is what it does to
that piece alone. So each piece comes about by one last join only, which can be found beforehand, and the joins ranked
by the score of what they make are the merges of an ordinary ranked BPE that gives the same tokens. (Only for equal
scores does the order differ: SentencePiece then goes from left to right, ranks go by the vocabulary's order.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from tokenmill.core.errors import ModelFileError

_LONGEST_WORK = 1 << 27
"""Bounds the time of a hostile vocabulary to seconds; Gemma's 256,000 pieces take a tenth."""


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The last join of every piece that can come about, best score first.

    `scores`: finite score of every piece that may be joined or come of joining. Raises `ModelFileError` if the pieces
    are so long that finding their joins would take minutes.
    """
    if sum(len(piece) ** 2 for piece in scores) > _LONGEST_WORK:
        raise ModelFileError(f"the vocabulary's pieces are too long: the longest has {max(map(len, scores))} characters")
    ranked = sorted((piece for piece in scores if len(piece) > 1), key=scores.__getitem__, reverse=True)
    return [join for piece in ranked if (join := _last_join(piece, scores))]


def _last_join(piece: str, scores: Mapping[str, float]) -> tuple[str, str] | None:
    """The two parts that remain before `piece` is whole; None for a piece at which joining never arrives."""
    parts = list(piece)
    if not all(part in scores for part in parts):
        return None
    joined = [scores.get(left + right, -math.inf) for left, right in pairwise(parts)]
    while len(parts) > 2:
        best = max(joined)
        if best == -math.inf:
            return None
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joined[at]
        if at > 0:
            joined[at - 1] = scores.get(parts[at - 1] + parts[at], -math.inf)
        if at < len(joined):
            joined[at] = scores.get(parts[at] + parts[at + 1], -math.inf)
    return parts[0], parts[1]
