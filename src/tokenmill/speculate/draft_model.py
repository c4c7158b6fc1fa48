"""A smaller model of the same vocabulary drafts, token by token.

Its keys and values lie in memory of its own, in frames of the same numbers as those of the target: it uses the target's page tables,
and a frame that is shared, cached or given back is so for both. What of a frame the draft model has computed is *marked*: a full frame
by a digest of all tokens up to its end, so that a prefix hit is one for the draft model too, if it was the one that got there before; a
frame in the making by the number of the sequence. A mark that is not as expected means that nothing is there, and it is computed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import FRAME
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.kv.manager import KVManager
from tokenmill.kv.table import HOLE, PageTable
from tokenmill.sampling.sampler import NO_TOKEN, Draw, Question, Sampler
from tokenmill.speculate.draft import Draft
from tokenmill.speculate.odds import Track
from tokenmill.speculate.proposer import Wish, Worth

F32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class Follower:
    """A sequence as the draft model knows it.

    number: marks its unfinished frames, below 0. written: the tokens whose keys and values it has computed, drafted ones included.
    digests: of the tokens up to the end of each full frame, as far as they were needed.
    """

    number: int
    track: Track
    written: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


class DraftModel:
    """Drafts with a tape whose pool has as many frames as the target's.

    group: of the target, whose page tables are used. rows: most positions computed in a step of drafting; a longer text is caught up
    with in several, and there is no draft until then. stream: of the noise that tokens are drawn with.
    """

    name = "draft"

    def __init__(self, tape: Tape, kv: KVManager, sampler: Sampler, group: int, n_frames: int, rows: int, stream: int) -> None:
        self._tape = tape
        self._kv = kv
        self._sampler = sampler
        self._group = group
        self._rows = rows
        self._stream = stream
        self._marks = np.zeros(n_frames, np.int64)
        self._followers: dict[Hashable, Follower] = {}
        self._numbers = count(1)
        self._seconds = 0.0  # to draft a token
'''  '''
