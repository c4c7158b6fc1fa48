"""One request being answered: from prompts to a stream of text deltas, whatever format they leave in.

Each choice ends exactly once here: by its last delta, or by the error that ends the request.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from tokenmill.core.messages import EngineInfo, Generate, SequenceOutput
from tokenmill.core.types import FinishReason, KVUsage, SamplingParams, Speculation, SpeculationUsage, TokenLogprobs
from tokenmill.gateway.replies import CachedTokens, Usage
from tokenmill.observe.metrics import Metrics

if TYPE_CHECKING:
    from tokenmill.cluster.local import Cluster
    from tokenmill.text.output import Delta, OutputText
    from tokenmill.text.tokenizer import Tokenizer


class Event(msgspec.Struct, frozen=True):
    """New text of choice `index`; choices are counted over all prompts, `n` each. `first`: nothing came before."""

    index: int
    delta: Delta
    first: bool


class _Choice:
    """The text of one choice and when it last grew (seconds, the host's monotonic clock)."""

    def __init__(self, text: OutputText) -> None:
        self.text = text
        self.began = False
        self.last: float | None = None


class Completion:
    """`prompts` x `params.n` choices of one HTTP request. Iterate `events` once, and close it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        engine: EngineInfo,
        priority: int = 1,
        cache_salt: str = "",
        session: str | None = None,
        arrived: float | None = None,
    ) -> None:
        """`params[i]` belongs to `prompts[i]`, with seed and max_tokens resolved. engine: which answers them. session: whose worker is
        preferred."""
        from tokenmill.text.output import OutputText

        self._metrics = metrics
        self._session = session
        self._kv_format = engine.kv_format
        self._proposer = engine.proposer
        self._sparsified: dict[int, tuple[int, int]] = {}
        self._speculation = Speculation()
        self._arrived = time.monotonic() if arrived is None else arrived
        self.id = uuid.uuid4().hex
        self._requests = [
            Generate(
                request_id=f"{self.id}.{index}",
                prompt=prompt,
                params=own,
                eos_ids=tuple(sorted(tokenizer.eos_ids)),
                priority=priority,
                cache_salt=cache_salt,
            )
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
        self._places = {request.request_id: index for index, request in enumerate(self._requests)}
        self.n = params[0].n
        self._choices = [_Choice(OutputText(tokenizer, own)) for own in params for _ in range(own.n)]
        self._cached: dict[int, int] = {}
        self._scorer: dict[int, int] = {}
        self.prompt_logprobs: list[list[TokenLogprobs | None]] = [[] for _ in prompts]
        """Of each prompt, complete when the first event of one of its choices is there; empty if not asked for."""

    async def events(self, cluster: Cluster) -> AsyncGenerator[Event, None]:
        """Send the requests and yield text as it comes. Raises `TokenmillError`; leaving early aborts what is unfinished."""
        reason = FinishReason.ABORT.value
        try:
            async with contextlib.aclosing(cluster.generate(*self._requests, session=self._session)) as outputs:
                async for output in outputs:
                    event = self._take(output)
                    if event is None:
                        continue
                    if event.delta.finish_reason is not None and output.finish_reason is None:
                        cluster.abort(output.request_id, output.choice, FinishReason.STOP)
                    yield event
        except Exception:
            reason = "error"
            raise
        finally:
            for choice in self._choices:
                if choice.text.finish_reason is None:
                    self._metrics.choice_ended(reason, time.monotonic() - self._arrived)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(len(request.prompt) for request in self._requests)
        completion = sum(choice.text.token_count for choice in self._choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=CachedTokens(sum(self._cached.values())),
            kv=KVUsage.over(self._kv_format, self._sparsified.values()),
            speculation=UNSET if self._proposer is None else SpeculationUsage.of(self._proposer, self._speculation),
        )

    def _take(self, output: SequenceOutput) -> Event | None:
        place = self._places[output.request_id]
        index = place * self.n + output.choice
        choice = self._choices[index]
        if output.prompt_logprobs is not None and self._scorer.setdefault(place, output.choice) == output.choice:
            self.prompt_logprobs[place] += output.prompt_logprobs
        if output.tokens:
            self._observe(place, choice, output)
        before = choice.text.token_count
        delta = choice.text.push(output)
        kept = choice.text.token_count - before
        self._metrics.generated(kept)
        if output.drafted:
            self._speculation.add(output.drafted, min(kept, len(output.tokens) - 1))
        if output.sparsified_from is not None and kept and (dropped := output.dropped_tokens[kept - 1]):
            self._sparsified[index] = output.sparsified_from, dropped
        if delta is None:
            return None
        if delta.finish_reason is not None:
            self._metrics.choice_ended(delta.finish_reason.value, time.monotonic() - self._arrived)
        event = Event(index, delta, not choice.began)
        choice.began = True
        return event

    def _observe(self, place: int, choice: _Choice, output: SequenceOutput) -> None:
        now = time.monotonic()
        if choice.last is None:
            self._metrics.first_output(now - self._arrived, output.first_scheduled - self._arrived)
            if output.choice == 0:  # the other choices find in the cache what this one has just computed
                self._cached[place] = output.cached_tokens
                self._metrics.prompt_computed(len(self._requests[place].prompt))
        else:
            self._metrics.next_output(now - choice.last)
        choice.last = now
