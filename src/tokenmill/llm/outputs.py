"""What the Python API returns; names follow vLLM's offline API."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tokenmill.core.errors import ModelBroken
from tokenmill.core.messages import EngineInfo, Generate, SequenceOutput
from tokenmill.core.types import FinishReason, KVUsage, Speculation, SpeculationUsage, TokenLogprobs
from tokenmill.text.output import OutputText
from tokenmill.text.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """One choice. `stop_reason` is the token id that ended it, if one did. `logprobs` runs beside `token_ids` (nats)."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' log-probabilities, if they were asked for."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)


@dataclass
class Usage:
    """Tokens of a request; `cached_tokens` of the prompt's were found in the prefix tree. kv: how its keys and values were kept.
    speculation: what was drafted for it; None where nobody drafts."""

    prompt_tokens: int
    kv: KVUsage
    completion_tokens: int = 0
    cached_tokens: int = 0
    speculation: SpeculationUsage | None = None


@dataclass
class RequestMetrics:
    """Seconds since the request arrived (`arrival_time` is on the monotonic clock); None until it happened."""

    arrival_time: float
    queue_time: float | None = None
    ttft: float | None = None
    e2e: float | None = None


@dataclass
class RequestOutput:
    """A request and all its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = False


class Collector:
    """Builds a `RequestOutput` from the engine's outputs."""

    def __init__(self, request: Generate, prompt: str | None, tokenizer: Tokenizer, info: EngineInfo) -> None:
        n, logprobs = request.params.n, request.params.logprobs is not None
        self.request = request
        self.failure: ModelBroken | None = None
        self._sparsified: dict[int, tuple[int, int]] = {}
        self._proposer = info.proposer
        self._speculation = Speculation()
        self._texts = [OutputText(tokenizer, request.params) for _ in range(n)]
        self.result = RequestOutput(
            request.request_id,
            prompt,
            request.prompt,
            [CompletionOutput(index=i, logprobs=[] if logprobs else None) for i in range(n)],
            Usage(len(request.prompt), KVUsage(info.kv_format), speculation=self._drafted()),
            RequestMetrics(time.monotonic()),
        )

    def finished(self) -> bool:
        """Whether the result is whole. Raises what ended the request instead."""
        if self.failure is not None:
            raise self.failure
        return self.result.finished

    def push(self, output: SequenceOutput) -> bool:
        """Take one output. True: a stop string was found, so the engine should be told to stop the choice."""
        if output.finish_reason is FinishReason.BROKEN:
            self.failure = ModelBroken.at_next_token()
            return False
        text, choice = self._texts[output.choice], self.result.outputs[output.choice]
        if text.finish_reason is not None:
            return False
        metrics, usage = self.result.metrics, self.result.usage
        now = time.monotonic()
        if metrics.ttft is None and output.tokens:
            metrics.ttft = now - metrics.arrival_time
            metrics.queue_time = max(0.0, output.first_scheduled - metrics.arrival_time)
        if output.prompt_logprobs is not None and self.result.prompt_logprobs is None:
            self.result.prompt_logprobs = output.prompt_logprobs
        usage.cached_tokens = max(usage.cached_tokens, output.cached_tokens)
        before = text.token_count
        delta = text.push(output)
        kept = text.token_count - before
        usage.completion_tokens += kept
        if output.drafted:
            self._speculation.add(output.drafted, min(kept, len(output.tokens) - 1))
            usage.speculation = self._drafted()
        if output.sparsified_from is not None and kept and (dropped := output.dropped_tokens[kept - 1]):
            self._sparsified[output.choice] = output.sparsified_from, dropped
            usage.kv = KVUsage.over(usage.kv.format, self._sparsified.values())
        if delta is None:
            return False
        choice.text += delta.text
        choice.token_ids += delta.tokens
        if choice.logprobs is not None and delta.logprobs is not None:
            choice.logprobs += delta.logprobs
        if delta.finish_reason is None:
            return False
        choice.finish_reason, choice.stop_reason = delta.finish_reason.value, delta.stop_token
        if all(t.finish_reason is not None for t in self._texts):
            self.result.finished = True
            metrics.e2e = now - metrics.arrival_time
        return output.finish_reason is None and delta.finish_reason is FinishReason.STOP

    def _drafted(self) -> SpeculationUsage | None:
        return None if self._proposer is None else SpeculationUsage.of(self._proposer, self._speculation)
