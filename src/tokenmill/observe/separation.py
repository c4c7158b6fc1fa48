"""What prefill and decode take, as the gateway sees it of each request: `PDMetrics`, in Python and under /metrics.

Who passes requests on (`cluster/dispatcher.py`) tells each request's `RequestTimes` what happens to it: a few calls per request, none per
token. Times that are told are seconds on one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prometheus_client.core import Metric

from tokenmill.core.types import FinishReason
from tokenmill.observe.histogram import BETWEEN_TOKENS, FIRST_TOKEN, TOKENS, TRANSFER, Histogram
from tokenmill.observe.statistics import Summary, summarise
from tokenmill.observe.text_table import aligned

KEPT = 10_000
"""Values of each kind that are kept for `report`, the latest ones."""

_UNITS = {
    "prefill_latency_ms": ("ms", 1),
    "decode_latency_per_token": ("ms", 2),
    "ttft_ms": ("ms", 1),
    "throughput_tokens_per_sec": ("tokens/s", 1),
    "kv_transfer_ms": ("ms", 2),
    "kv_transfer_exposed_ms": ("ms", 2),
    "spec_acceptance_rate": ("", 3),
}
"""Of each kind of value, and the decimals that it is shown with."""


class PDMetrics:
    """The latest values of all requests, as plain numbers to which more may be added.

    prefill_latency_ms: from when a prompt was sent to a worker to its first token. decode_latency_per_token: milliseconds for each token
    after the first. ttft_ms: from a request's arrival to its first token. throughput_tokens_per_sec: what a request got, from its arrival
    to its end. kv_transfer_ms: that copying the frames of a prompt from another worker took; kv_transfer_exposed_ms: what of it was not
    hidden, which is the time between the prompt's token and the next one, of another worker, beyond what a token takes there.
    spec_acceptance_rate: share of drafted tokens that were right, of a request with drafts.
    """

    def __init__(self) -> None:
        self.prefill_latency_ms: deque[float] = deque(maxlen=KEPT)
        self.decode_latency_per_token: deque[float] = deque(maxlen=KEPT)
        self.ttft_ms: deque[float] = deque(maxlen=KEPT)
        self.throughput_tokens_per_sec: deque[float] = deque(maxlen=KEPT)
        self.kv_transfer_ms: deque[float] = deque(maxlen=KEPT)
        self.kv_transfer_exposed_ms: deque[float] = deque(maxlen=KEPT)
        self.spec_acceptance_rate: deque[float] = deque(maxlen=KEPT)
        self._prefill = Histogram(FIRST_TOKEN)
        self._per_token = Histogram(BETWEEN_TOKENS)
        self._transfer = Histogram(TRANSFER)
        self._exposed = Histogram(TRANSFER)
        self._recomputed = Histogram(TOKENS)
        self._paused = Histogram(FIRST_TOKEN)

    def request(self, now: float) -> RequestTimes:
        """A request has arrived."""
        return RequestTimes(self, now)

    def summaries(self) -> dict[str, Summary | None]:
        """Of each kind of value, by its name; None where there are none."""
        return {name: summarise(getattr(self, name)) for name in _UNITS}

    def report(self) -> dict[str, dict[str, float]]:
        """Print mean, P50 and P99 of each kind of value as a table. Returns the numbers, by the value's name and then `mean`, `p50` and
        `p99`; without those of which there are none."""
        found = self.summaries()
        cells = [["metric", "unit", "n", "mean", "P50", "P99"]]
        for name, (unit, digits) in _UNITS.items():
            summary = found[name]
            figures = ["-"] * 3 if summary is None else [f"{value:.{digits}f}" for value in (summary.mean, summary.p50, summary.p99)]
            cells.append([name, unit, str(0 if summary is None else summary.n), *figures])
        print("\n".join(aligned(cells, [True, True, False, False, False, False])))
        return {name: {"mean": s.mean, "p50": s.p50, "p99": s.p99} for name, s in found.items() if s is not None}

    def families(self, model: str) -> Iterator[Metric]:
        """Under /metrics, since the start."""
        yield self._prefill.family("request_prefill_time_seconds", "From the sending of a prompt to a worker to its first token.", model)
        yield self._per_token.family("request_time_per_output_token_seconds", "Of a choice, per token after the first.", model)
        yield self._transfer.family("kv_transfer_time_seconds", "Of a request: copying KV frames of its prompt between workers.", model)
        yield self._exposed.family(
            "kv_transfer_exposed_seconds",
            "Of a request: from the prompt's token of one worker to the next one of another, less what a token takes there.",
            model,
        )
        yield self._recomputed.family(
            "recovery_recomputed_tokens", "Of a choice that lost its worker: tokens that were computed again by the next one.", model
        )
        yield self._paused.family("recovery_pause_seconds", "Of such a choice: from the loss to its next token.", model)

    # Told by RequestTimes

    def prompt_computed(self, since_arrival: float, since_sent: float) -> None:
        self.ttft_ms.append(1e3 * since_arrival)
        self.prefill_latency_ms.append(1e3 * since_sent)
        self._prefill.observe(since_sent)

    def transferred(self, seconds: float) -> None:
        self.kv_transfer_ms.append(1e3 * seconds)
        self._transfer.observe(seconds)

    def exposed(self, seconds: float) -> None:
        self.kv_transfer_exposed_ms.append(1e3 * seconds)
        self._exposed.observe(seconds)

    def recovered(self, recomputed: int, seconds: float) -> None:
        """A choice goes on elsewhere, whose worker was lost so long ago."""
        self._recomputed.observe(recomputed)
        self._paused.observe(seconds)

    def decoded(self, per_token: float) -> None:
        self.decode_latency_per_token.append(1e3 * per_token)
        self._per_token.observe(per_token)


class RequestTimes:
    """One request on its way. Calls that have no place in it (a choice that ends before it has begun) are let pass."""

    __slots__ = ("_accepted", "_all", "_arrived", "_copied", "_drafted", "_first", "_handed_over", "_prompt_at")

    def __init__(self, of: PDMetrics, now: float) -> None:
        self._all = of
        self._arrived = now
        self._first: float | None = None
        self._prompt_at: float | None = None  # the token of a prefill worker, until another worker goes on
        self._copied: float | None = None  # seconds, of the frames for that
        self._handed_over: tuple[float, float, int] | None = None  # both times, and the tokens that there were then
        self._drafted = self._accepted = 0

    def first_output(self, now: float, index: int, tokens: int, sent: float, *, prefill: bool) -> None:
        """The first tokens of one worker. index: of the first of them in the choice. sent: when the worker got its part. prefill: it
        computes the prompt alone."""
        if index == 0 and self._first is None:
            self._first = now
            self._all.prompt_computed(now - self._arrived, now - sent)
        if prefill:
            self._prompt_at = now
        elif self._prompt_at is not None:
            if self._copied is not None:
                self._handed_over = self._prompt_at, now, index + tokens
                self._all.transferred(self._copied)
            self._prompt_at = self._copied = None

    def copied(self, seconds: float) -> None:
        """A chunk of the prompt's frames has been copied to the worker that is to go on."""
        self._copied = (self._copied or 0.0) + seconds

    def verified(self, drafted: int, accepted: int) -> None:
        """A step has verified a draft."""
        self._drafted += drafted
        self._accepted += accepted

    def choice_ended(self, now: float, tokens: int, reason: FinishReason) -> None:
        """A choice has so many tokens, and no more will come. One that nobody wants any more or that has failed says nothing: when it
        had its last token is not known."""
        if self._first is None or not tokens or reason in (FinishReason.ABORT, FinishReason.BROKEN):
            return
        if tokens > 1:
            self._all.decoded((now - self._first) / (tokens - 1))
        if now > self._arrived:
            self._all.throughput_tokens_per_sec.append(tokens / (now - self._arrived))
        if self._drafted:
            self._all.spec_acceptance_rate.append(self._accepted / self._drafted)
        if self._handed_over is not None:
            prompt_at, went_on, there = self._handed_over
            if tokens > there:  # otherwise nobody knows what a token takes there
                self._all.exposed(max(0.0, went_on - prompt_at - (now - went_on) / (tokens - there)))
