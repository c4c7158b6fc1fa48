"""What the engine knows of a sequence beside what the scheduler does."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.types import TokenLogprobs
from tokenmill.sampling.state import SamplerState


@dataclass(slots=True)
class Generation:
    """A sequence's sampler, the tokens that end it, and the prompt log-probabilities found so far, by position."""

    sampler: SamplerState
    ends: frozenset[int]
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
