"""A sequence: one generation, from which everything else about it can be rebuilt."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.types import FinishReason, SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """One generation, wholly described by its token ids, sampling parameters, seed, `computed` and `target`.

    token_ids: prompt and output; grows as tokens are sampled. prompt_len: of these, the prompt's.
    arrival: seconds on the scheduler's clock; siblings of one request share it.
    reuse: False computes every position, whatever the prefix tree holds (prompt log-probabilities need them all).
    computed: positions whose keys and values are in frames. Preemption sets it back to 0; what it computes again
    is the same.
    cached_tokens, first_scheduled: prompt tokens found in the prefix tree, and the time, at first admission.
    running: whether it has a place in the batch and frames.
    finish_reason, stop_token: set by whoever ends the sequence.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int = 1
    arrival: float = 0.0
    cache_salt: str = ""
    reuse: bool = True
    prompt_len: int = field(init=False)
    id: tuple[str, int] = field(init=False)
    rank: tuple[int, float, str, int] = field(init=False)
    computed: int = field(default=0, init=False)
    running: bool = field(default=False, init=False)
    cached_tokens: int = field(default=0, init=False)
    first_scheduled: float | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_token: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.token_ids, f"sequence {self.request_id} has no prompt"
        self.prompt_len = len(self.token_ids)
        self.id = (self.request_id, self.choice)
        self.rank = (self.priority, self.arrival, self.request_id, self.choice)

    @property
    def target(self) -> int:
        """Positions that `computed` has to reach before the next token can be sampled."""
        return len(self.token_ids)

    @property
    def n_output(self) -> int:
        return len(self.token_ids) - self.prompt_len
