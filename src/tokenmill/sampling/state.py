"""What sampling needs to know of one sequence: its parameters, resolved into arrays, and which tokens it has seen.

Everything here is a function of the prompt, the output so far and the parameters, so it is rebuilt, never saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.core.types import SamplingParams

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

_NO_TOKENS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)
_SEED_BITS = (1 << 64) - 1


class SamplerState:
    """One choice of one request. Call `observe` with every output token."""

    def __init__(self, params: SamplingParams, choice: int, prompt: Sequence[int], ends: Iterable[int]) -> None:
        """`ends`: tokens that would end the sequence, forbidden until there are `min_tokens`."""
        assert params.seed is not None, "the seed is drawn at admission"
        seed = params.seed & _SEED_BITS
        self.params = params
        self.top_k = max(params.top_k, 0)
        self.whole = (self.top_k, seed - (1 << 64) if seed >> 63 else seed, choice)
        self.real = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self.bias = np.array(list(params.logit_bias), np.int32) if params.logit_bias else _NO_TOKENS
        self.bias_value = np.array(list(params.logit_bias.values()), np.float32) if params.logit_bias else _NO_VALUES
        self._ends = np.array(sorted(set(ends)), np.int32)
        self._n_output = 0
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._counts: dict[int, int] | None = None
        if penalised:
            # Only the repetition penalty looks at the prompt; the others count output.
            self._counts = dict.fromkeys(prompt, 0) if params.repetition_penalty != 1 else {}

    def observe(self, token: int) -> None:
        self._n_output += 1
        if self._counts is not None:
            self._counts[token] = self._counts.get(token, 0) + 1

    @property
    def banned(self) -> I32:
        """Tokens that may not come next."""
        return self._ends if self._n_output < self.params.min_tokens else _NO_TOKENS

    @property
    def seen(self) -> tuple[I32, I32]:
        """Tokens under a penalty, and how often each is in the output."""
        if not self._counts:
            return _NO_TOKENS, _NO_TOKENS
        return np.array(list(self._counts), np.int32), np.array(list(self._counts.values()), np.int32)
