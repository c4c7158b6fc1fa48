"""What the engine knows of a sequence beside what the scheduler does."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.types import TokenLogprobs
from tokenmill.sampling.state import SamplerState


@dataclass(slots=True)
class Generation:
    """A sequence's sampler, the tokens that end it, the epoch of its request, and the prompt log-probabilities found so far, by
    position."""

    sampler: SamplerState
    ends: frozenset[int]
    epoch: int = 0
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
