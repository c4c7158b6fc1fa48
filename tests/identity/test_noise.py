"""Noise belongs to a token id: what is done to tokens that were not drawn anyway changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from comparison import Alone
from request_pool import RequestPool
from traffic import Request

from tokenmill import _native
from tokenmill.core.types import SamplingParams
from tokenmill.sampling.sampler import Draw


def sampled(pool: RequestPool) -> list[Request]:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, logprobs=8)
    return [
        Request(r.prompt, msgspec.structs.replace(params, seed=seed), ())
        for seed, r in enumerate(sorted(pool.short, key=lambda request: request.length)[4:8])
    ]


def changed_answers(alone: Alone, requests: Sequence[Request]) -> list[str]:
    """Forbid likely tokens that were not drawn, or cut off the tail below the least likely one that was; says which answers change."""
    changed = []
    for request in requests:
        answer = alone.answers(request)[0]
        likely = {token for found in answer.logprobs for token, _ in found.top} - set(answer.tokens)
        assert likely, "every likely token was drawn"
        for edit in ({"logit_bias": dict.fromkeys(likely, -100.0)}, {"top_k": 1 + max(f.rank for f in answer.logprobs)}):
            edited = alone.answers(Request(request.prompt, msgspec.structs.replace(request.params, **edit), ()))[0]
            if edited != answer:
                changed.append(f"{edit} of {request}: {edited.tokens} instead of {answer.tokens}")
    return changed


def test_what_is_done_to_tokens_that_were_not_drawn_changes_nothing(pool: RequestPool) -> None:
    assert not (changed := changed_answers(pool.alone, sampled(pool))), "\n".join(changed)


def test_noise_by_rank_is_found(pool: RequestPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(logits: Any, draws: Sequence[Draw]) -> list[list[int]]:
        tokens = []
        for row, state, position, _ in draws:
            z = logits[row].copy()
            for token, bias in state.params.logit_bias.items():
                z[token] += bias
            best = np.argsort(-z, kind="stable")[: state.params.top_k if state.params.top_k > 0 else 100]
            seed = state.params.seed % 2**64
            scores = [z[t] + _native.gumbel(seed, state.choice, position, rank) for rank, t in enumerate(best)]
            tokens.append([int(best[np.argmax(scores)])])
        return tokens

    alone = Alone(pool.alone.model, {})
    monkeypatch.setattr(alone._engine._runner._sampler, "sample", by_rank)
    assert changed_answers(alone, sampled(pool))
