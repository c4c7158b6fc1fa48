"""The values that every layer agrees on: sampling parameters, priorities, finish reasons, log-probabilities."""

from __future__ import annotations

import enum
import math
import reprlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from tokenmill.core.errors import InvalidRequest

FRAME = 8
"""Token positions in a frame, the granule of sharing, hashing, reference counting and transfer."""

CUT = 512
"""Absolute positions in an attention cut (docs/numerics.md)."""

KVType: TypeAlias = Literal["bf16", "int8", "int4"]
"""What keys or values are rounded to."""

Strategy: TypeAlias = Literal["topk_heads", "topk_positions", "none"]
"""What a sequence gives up as its KV budget is used up (docs/sparse-attention.md)."""

Pair: TypeAlias = tuple[int, int]
"""A layer and a KV head of it."""

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
"""In all stop strings together: each costs memory for every choice."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """The rule of KV heads that see everything until their sequence is sparse; then a query at position p attends to [0, sinks) and to
    (p - recent, p]. sinks: a multiple of 16; recent: of 8."""

    sinks: int
    recent: int

    def __post_init__(self) -> None:
        assert self.sinks >= 0, f"{self.sinks} sinks"
        assert self.sinks % 16 == 0, f"{self.sinks} sinks are no multiple of 16"
        assert self.recent >= FRAME, f"{self.recent} recent tokens"
        assert self.recent % FRAME == 0, f"{self.recent} recent tokens are no multiple of {FRAME}"


class Priority(enum.IntEnum):
    """Smaller is served first."""

    VIP = 0
    NORMAL = 1
    BACKGROUND = 2


class FinishReason(enum.StrEnum):
    """Why a sequence ended. `STOP` covers end-of-sequence tokens, stop tokens and stop strings; `BROKEN` means that the model
    gave no finite logits, which callers see as the error `ModelBroken`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    KV_BUDGET = "kv_budget"
    BROKEN = "broken"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled. The order in which the filters apply is fixed in docs/sampling.md.

    temperature 0 is greedy; top_k 0 (or -1) and top_p 1 and min_p 0 switch a filter off. `logprobs` is the
    number of alternatives reported per output token beside the chosen one (0: the chosen one only; None: no
    log-probabilities), `prompt_logprobs` likewise for prompt tokens. `max_tokens` None means up to the context
    limit. `seed` None is drawn at admission. `min_tokens` suppresses end-of-sequence and stop tokens until that
    many tokens exist. `kv_budget_mb` (MiB) is what the keys and values of each choice may take; what happens as that fills up is a
    setting of the engine.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    kv_budget_mb: float | None = None

    def check(self, vocab_size: int | None = None) -> SamplingParams:
        """Return self, or raise `InvalidRequest` naming the first field out of range."""

        def need(ok: bool, param: str, wanted: str) -> None:
            if not ok:
                value = reprlib.repr(getattr(self, param))
                raise InvalidRequest(f"{param} is {value}, but must be {wanted}", param=param)

        finite = math.isfinite
        need(1 <= self.n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}")
        need(self.temperature == 0 or 1e-6 <= self.temperature <= 100, "temperature", "0 (greedy) or between 0.000001 and 100")
        need(-1 <= self.top_k < 2**31, "top_k", "-1 or 0 (off) or a positive number below 2**31")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        need(finite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100, "repetition_penalty", "above 0 and at most 100")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        need(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        need(self.min_tokens >= 0, "min_tokens", "at least 0")
        need(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens ({self.max_tokens})")
        need(len(self.stop) <= MAX_STOP_STRINGS and all(self.stop), "stop", f"at most {MAX_STOP_STRINGS} non-empty strings")
        need(sum(map(len, self.stop)) <= MAX_STOP_CHARACTERS, "stop", f"at most {MAX_STOP_CHARACTERS} characters in all")
        need(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"between 0 and {MAX_LOGPROBS}")
        need(self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS, "prompt_logprobs", f"between 0 and {MAX_LOGPROBS}")
        biases = self.logit_bias.values()
        need(all(finite(b) and -100 <= b <= 100 for b in biases), "logit_bias", "a map of token id to a bias between -100 and 100")
        budget = self.kv_budget_mb
        need(budget is None or 0 < budget < 1e9, "kv_budget_mb", "above 0 and below 1e9")
        top = vocab_size if vocab_size is not None else 2**31
        need(all(0 <= t < top for t in self.logit_bias), "logit_bias", f"a map whose token ids lie in [0, {top})")
        need(all(0 <= t < top for t in self.stop_token_ids), "stop_token_ids", f"token ids in [0, {top})")
        return self

    def resolved(self, room: int) -> SamplingParams:
        """Return self with a seed and with `max_tokens`, whose default is `room`, the tokens that the context leaves.

        Raises `InvalidRequest` if `min_tokens` is above it.
        """
        limit = room if self.max_tokens is None else self.max_tokens
        return msgspec.structs.replace(self.with_seed(), max_tokens=limit).check()

    def with_seed(self) -> SamplingParams:
        """Return self with a seed: the caller's, or one drawn from the system."""
        if self.seed is not None:
            return self
        return msgspec.structs.replace(self, seed=secrets.randbits(63))


class KVUsage(msgspec.Struct, frozen=True):
    """How the keys and values of an answer were kept: their format; the first position that had not seen all before it, because the KV
    budget ran low (None: each saw all); and how many positions some head no longer had at the end, over all choices."""

    format: str
    sparsified_from: int | None = None
    dropped_tokens: int = 0

    @classmethod
    def over(cls, format: str, choices: Collection[tuple[int, int]]) -> KVUsage:
        """choices: `sparsified_from` and `dropped_tokens` of those that were sparsified."""
        if not choices:
            return cls(format)
        return cls(format, min(first for first, _ in choices), sum(dropped for _, dropped in choices))


class Speculation(msgspec.Struct):
    """What was drafted, and what of it was right. drafts: steps of a sequence that verified one. drafted, accepted: by position in the
    draft, tokens that were verified, and that were right."""

    drafts: int = 0
    drafted: list[int] = []
    accepted: list[int] = []

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step that verified a draft, the step's own one included; 0 without drafts."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 0.0

    def add(self, length: int, accepted: int) -> None:
        """One more draft, of `length` tokens."""
        self.drafts += 1
        missing = length - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for position in range(length):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted


class SpeculationUsage(msgspec.Struct, frozen=True):
    """What was drafted for an answer, over all its choices, and what of it is in the answer.

    proposer: who drafted. drafts, mean_accepted_length, *_by_position: as in `Speculation`. drafted, accepted: tokens over all positions.
    """

    proposer: str
    drafts: int
    drafted: int
    accepted: int
    mean_accepted_length: float
    drafted_by_position: list[int]
    accepted_by_position: list[int]

    @classmethod
    def of(cls, proposer: str, counted: Speculation) -> SpeculationUsage:
        return cls(
            proposer,
            counted.drafts,
            sum(counted.drafted),
            sum(counted.accepted),
            counted.mean_accepted_length,
            list(counted.drafted),
            list(counted.accepted),
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, in nats, of the model's own distribution (before bias and filters).

    `token` is the sampled or given token, `rank` its 0-based rank; `top` lists the most likely tokens, best
    first, ties to the lower id.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
