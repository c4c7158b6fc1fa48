"""Rows of logits to tokens and log-probabilities, natively and row by row in parallel (docs/sampling.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill import _native
from tokenmill.core.types import TokenLogprobs
from tokenmill.kernels.native import Pool
from tokenmill.sampling.state import SamplerState

F32 = npt.NDArray[np.float32]


NO_TOKEN = -1


class Draw(NamedTuple):
    """Sample from row `row` of the logits, for the token at absolute position `position`."""

    row: int
    state: SamplerState
    position: int


class Question(NamedTuple):
    """How likely was `token` under row `row`, and which were the `top` likeliest tokens?"""

    row: int
    token: int
    top: int


class Sampler:
    """Stateless but for its threads."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def sample(self, logits: F32, draws: Sequence[Draw]) -> list[int]:
        """One token per draw, or `NO_TOKEN` from a row without a finite maximum. logits: float32 [rows, vocabulary]."""
        rows, states, positions = [d.row for d in draws], [d.state.native for d in draws], [d.position for d in draws]
        return _native.sample(self._pool.native, self._pool.variant, logits, rows, states, positions)

    def likelihoods(self, logits: F32, questions: Sequence[Question]) -> list[TokenLogprobs]:
        """Log-probabilities under softmax(logits), before any bias, penalty or filter; in nats."""
        n, top = len(questions), max(q.top for q in questions)
        rows = np.array([q.row for q in questions], np.int32)
        tokens = np.array([q.token for q in questions], np.int32)
        logprob, rank = np.empty(n, np.float64), np.empty(n, np.int32)
        best, best_logprob = np.empty((n, top), np.int32), np.empty((n, top), np.float64)
        _native.likelihoods(self._pool.native, self._pool.variant, logits, rows, tokens, logprob, rank, best, best_logprob)
        return [
            TokenLogprobs(q.token, lp, r, tuple(zip(ids[: q.top], lps[: q.top], strict=True)))
            for q, lp, r, ids, lps in zip(questions, logprob.tolist(), rank.tolist(), best.tolist(), best_logprob.tolist(), strict=True)
        ]
