"""What sampling needs to know of one sequence: its parameters, and what it has put out so far.

Everything here is a function of the prompt, the output so far and the parameters, so it is rebuilt, never saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenmill import _native
from tokenmill.core.types import SamplingParams
from tokenmill.sampling.mask import Mask, Words, allowed_along

_SEED_BITS = (1 << 64) - 1


class SamplerState:
    """One choice of one request. Call `observe` with every output token.

    The native sampler keeps it, so that a step hands over nothing but which row is whose.
    """

    def __init__(self, params: SamplingParams, choice: int, prompt: Sequence[int], ends: Iterable[int], mask: Mask | None = None) -> None:
        """`ends`: tokens that would end the sequence, forbidden until there are `min_tokens`. mask: what else is; the state owns it."""
        assert params.seed is not None, "the seed is drawn at admission"
        self.params = params
        self.choice = choice
        self._mask = mask
        self.native = _native.SampleState(
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            top_k=max(params.top_k, 0),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            seed=params.seed & _SEED_BITS,
            choice=choice,
            min_tokens=params.min_tokens,
            bias=list(params.logit_bias),
            bias_value=list(params.logit_bias.values()),
            ends=sorted(set(ends)),
            prompt=prompt if params.repetition_penalty != 1 else [],
        )

    def observe(self, token: int) -> None:
        self.native.observe(token)
        if self._mask is not None:
            self._mask.observe(token)

    def retract(self, token: int) -> None:
        """Take back one `observe(token)`, the latest if there is a mask. ValueError if a penalty counts tokens and there was none."""
        self.native.retract(token)
        if self._mask is not None:
            self._mask.retract(token)

    def allowed(self, draft: Sequence[int]) -> Words | None:
        """As `allowed_along`; None: everything."""
        return None if self._mask is None else allowed_along(self._mask, draft)
