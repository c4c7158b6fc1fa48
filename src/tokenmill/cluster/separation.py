"""Whether a request is worth separating: its prompt computed by a prefill worker and handed over, or whole on the decode worker.

Counted is waiting time: of the request itself until it can decode, and of the streams that are held up while its prompt is computed beside
them. All that goes into it is measured while serving (rates.py).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tokenmill.cluster.breaker import Link
from tokenmill.cluster.rates import Rates
from tokenmill.core.clock import Clock
from tokenmill.core.errors import ConfigError
from tokenmill.core.types import SamplingParams
from tokenmill.kv.budget import WEIGHED


class SeparationPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """always: whatever can be separated is. min_tokens: a prompt of which fewer must be computed stays whole. min_gain: so must one that
    would gain less, in seconds of waiting.
    prefill_speed (tokens per second), transfer_rate (bytes per second), handover_seconds (messages of one hand-over, without its bytes):
    what is expected before anything is measured."""

    always: bool = False
    min_tokens: int = 64
    min_gain: float = 0.005
    prefill_speed: float = 1000.0
    transfer_rate: float = 1e9
    handover_seconds: float = 0.005

    def __post_init__(self) -> None:
        for name in ("min_tokens", "min_gain"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 0", param=name)
        for name in ("prefill_speed", "transfer_rate", "handover_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be above 0", param=name)


class Side(NamedTuple):
    """One of the two workers. cached_tokens: how much of the prompt it has. queued_tokens: prompt tokens that it computes before.
    streams: that decode there, and wait while a prompt is computed. chunk_size: prompt tokens in one step at most."""

    worker_id: str
    cached_tokens: int
    queued_tokens: int
    streams: int
    chunk_size: int


class Decision(NamedTuple):
    """separate_seconds and whole_seconds: of waiting, as expected; None where no choice was left."""

    separate: bool
    reason: str
    whole_seconds: float | None = None
    separate_seconds: float | None = None


def must_stay_whole(params: SamplingParams, prompt_tokens: int, first_point: int | None = None) -> str | None:
    """Why a request can't be handed over, whatever that would gain; None: it can. first_point: tokens after which its KV budget makes
    it drop frames for the first time (`kv.budget.Ladder`), if there is such a point.

    Several choices fork where their prompt is; log-probabilities of a prompt exist where it is computed; and what a point drops goes by the
    attention of the positions before it, which only the worker that has computed them knows.
    """
    if params.n > 1:
        return f"it has {params.n} choices"
    if params.prompt_logprobs is not None:
        return "it asks for log-probabilities of its prompt"
    if first_point is not None and first_point < prompt_tokens + WEIGHED:
        return f"its KV budget drops frames at {first_point} tokens"
    return None


class Separation:
    """The decision and what has been measured for it."""

    def __init__(self, clock: Clock, policy: SeparationPolicy | None = None) -> None:
        self._policy = policy or SeparationPolicy()
        self._prefill = Rates[str](clock, self._policy.prefill_speed, worth=0.25)
        self._transfer = Rates[Link](clock, self._policy.transfer_rate, worth=0.02)
        self._handovers = Rates[str](clock, 1 / self._policy.handover_seconds, worth=0.05)

    def observe_prefill(self, worker_id: str, tokens: int, seconds: float) -> None:
        """A worker has computed so many prompt tokens in so long, between the start and the end of its steps."""
        self._prefill.observe(worker_id, tokens, seconds)

    def observe_transfer(self, source: str, target: str, n_bytes: int, seconds: float) -> None:
        """Frames were read by the target from the source."""
        self._transfer.observe((source, target), n_bytes, seconds)

    def observe_handover(self, seconds: float) -> None:
        """What a hand-over took longer than its bytes."""
        self._handovers.observe("all", 1, seconds)

    def prefill_speed(self, worker_id: str) -> float | None:
        """Prompt tokens per second of a worker, if any were measured."""
        return self._prefill.of(worker_id) if self._prefill.measured(worker_id) else None

    def forget(self, worker_id: str) -> None:
        """A worker has left: the next process of that id may be on another machine."""
        self._prefill.forget(worker_id)
        for link in self._transfer:
            if worker_id in link:
                self._transfer.forget(link)

    def decide(self, prompt_tokens: int, prefill: Side, decode: Side, bytes_per_token: int) -> Decision:
        """bytes_per_token: of KV, as it is handed over. Pure but for what has been measured."""
        if prefill.worker_id == decode.worker_id:
            return Decision(False, "both are the same worker")
        missing = prompt_tokens - decode.cached_tokens
        if missing < self._policy.min_tokens:
            return Decision(False, f"only {missing} tokens of its prompt are to be computed")
        if self._policy.always:
            return Decision(True, "whatever can be separated is")
        ahead, here = self._prefill_seconds(prompt_tokens, decode)
        whole = ahead + here + decode.streams * here
        ahead, there = self._prefill_seconds(prompt_tokens, prefill)
        # Chunks are fetched while later ones are computed: either the last one is waited for, or a slow link is busy from the first one on.
        fetch = bytes_per_token / self._transfer.of((prefill.worker_id, decode.worker_id))
        chunk = min(prefill.chunk_size, missing)
        first = min(there, chunk / self._prefill.of(prefill.worker_id))
        fetched = max(there + chunk * fetch, first + missing * fetch)
        separate = ahead + fetched + prefill.streams * there + 1 / self._handovers.of("all")
        if whole - separate < self._policy.min_gain:
            return Decision(False, f"separated it would wait {separate:.3f} s, whole {whole:.3f} s", whole, separate)
        return Decision(True, f"whole it would wait {whole:.3f} s, separated {separate:.3f} s", whole, separate)

    def _prefill_seconds(self, prompt_tokens: int, side: Side) -> tuple[float, float]:
        """Until a worker begins with the prompt, and from there until it is computed. A token of it is always left to compute."""
        speed = self._prefill.of(side.worker_id)
        return side.queued_tokens / speed, max(1, prompt_tokens - side.cached_tokens) / speed
