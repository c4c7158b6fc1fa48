"""Rows of logits to tokens and log-probabilities, natively and row by row in parallel (docs/sampling.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill import _native
from tokenmill.core.types import TokenLogprobs
from tokenmill.kernels.native import Pool
from tokenmill.sampling.mask import Words
from tokenmill.sampling.state import SamplerState

F32 = npt.NDArray[np.float32]


NO_TOKEN = -1


PROPOSING = 1
"""The stream of noise from which a draft model draws for `Sampler.reject`; for `Sampler.sample` it draws from that of the target, 0."""


class Draw(NamedTuple):
    """Sample from row `row` of the logits, for the token at absolute position `position`; and from the row after it for the next token,
    as long as `draft` says rightly what came before. A state that looks back (penalties, `min_tokens` to come) and has a draft is in no
    other draw of a call."""

    row: int
    state: SamplerState
    position: int
    draft: Sequence[int] = ()


class _Columns(NamedTuple):
    """Draws as the native sampler takes them."""

    rows: list[int]
    states: list[_native.SampleState]
    positions: list[int]
    drafts: list[Sequence[int]]
    allowed: list[Words | None]


def _columns(draws: Sequence[Draw]) -> _Columns:
    return _Columns(
        [d.row for d in draws],
        [d.state.native for d in draws],
        [d.position for d in draws],
        [d.draft for d in draws],
        [d.state.allowed(d.draft) for d in draws],
    )


class Question(NamedTuple):
    """How likely was `token` under row `row`, and which were the `top` likeliest tokens?"""

    row: int
    token: int
    top: int


class Sampler:
    """Stateless but for its threads."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def sample(self, logits: F32, draws: Sequence[Draw], stream: int = 0) -> list[list[int]]:
        """For each draw the tokens that drawing one by one gives, as long as they are those of its draft, and one more.

        The last may be `NO_TOKEN`, from a row without a finite maximum. logits: float32 [rows, vocabulary]. `stream`: of the noise.
        States are as before afterwards. ValueError for a row or a token that does not exist.
        """
        return _native.sample(self._pool.native, self._pool.variant, logits, *_columns(draws), stream)

    def reject(self, logits: F32, draws: Sequence[Draw], proposals: Sequence[F32 | None]) -> list[list[int]]:
        """As `sample`, but each token of a draft stands with probability min(1, p / q), else one of max(0, p - q) replaces it and is the
        last (Leviathan et al. 2023, Chen et al. 2023): the distribution is the target's, the tokens are others than without a draft.

        proposals: float32 [tokens of the draft, vocabulary] for each draw, the draft model's logits (-inf: cannot be proposed), from which
        `sample` drew the draft with `stream=PROPOSING` and the tokens before it observed; or None for a draft that is certain. Whether a
        token is put forward may depend on its row there, never on which token was drawn from it.
        """
        return _native.reject(self._pool.native, self._pool.variant, logits, *_columns(draws), proposals)

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
