"""`LLM`: batches of prompts, answered in the calling process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.engine import Engine
from tokenmill.llm.outputs import Collector, RequestOutput
from tokenmill.llm.requests import Conversation, Frontend, Prompt, configure, many_prompts, params_for
from tokenmill.text.tokenizer import Tokenizer


class LLM:
    """A model, ready to generate.

    model: a catalogue name (`smollm2:135m`), `hf:org/repo[:file]`, or the path of a .gguf file or a Hugging Face
    folder. settings: those of `EngineConfig`, as keywords; an unknown one raises `ConfigError` naming the nearest.

    Not thread-safe. Use it as a context manager, or call `close`, to give its memory back.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        config = configure(model, settings)
        self._engine: Engine | None = build_engine(config)
        self.info = self._engine.info
        self._frontend = Frontend(config, self.info)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt (a string, token ids, or `{"prompt_token_ids": ids}`); results in the order of the prompts.

        Raises `InvalidRequest` for a prompt or parameter that cannot be served; then nothing has been generated.
        """
        given = many_prompts(prompts)
        made = [self._frontend.request(p, s) for p, s in zip(given, params_for(sampling_params, len(given)), strict=True)]
        return self._finish([request for request, _ in made], [text for _, text in made])

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of `{"role", "content"}`), or several."""
        several: list[Any] = list(messages) if messages and not hasattr(messages[0], "keys") else [messages]
        params = params_for(sampling_params, len(several))
        requests = [self._frontend.chat_request(m, p) for m, p in zip(several, params, strict=True)]
        return self._finish(requests, [None] * len(requests))

    def stream_chat(self, messages: Conversation, sampling_params: SamplingParams | None = None) -> Iterator[tuple[str, RequestOutput]]:
        """Answer a conversation, yielding the text that each step added and the result so far. Leaving early aborts the request."""
        request = self._frontend.chat_request(messages, sampling_params or SamplingParams())
        collector = Collector(request, None, self.tokenizer)
        for outputs in self._steps([request]):
            for output in outputs:
                before = len(collector.result.outputs[output.choice].text)
                self._push(collector, output)
                yield collector.result.outputs[output.choice].text[before:], collector.result

    def get_kv_cache_stats(self) -> dict[str, Any]:
        """Counters of the KV cache: frames of 8 tokens by state, bytes per token, prefix hits, evictions, preemptions."""
        stats = self._running.stats()
        return {
            "total_frames": stats.kv_total,
            "free_frames": stats.kv_free,
            "cached_frames": stats.kv_cached,
            "used_frames": stats.kv_held,
            "bytes_per_token": self.info.kv_bytes_per_token,
            "prefix_queries": stats.prefix_queries,
            "prefix_hits": stats.prefix_hits,
            "hit_rate": stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
            "evictions": stats.evictions,
            "preemptions": stats.preemptions,
        }

    def close(self) -> None:
        """Free the weights and the KV pool. The object is of no use afterwards."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def _running(self) -> Engine:
        if self._engine is None:
            raise InvalidRequest("this LLM is closed: make a new one")
        return self._engine

    def _finish(self, requests: list[Generate], texts: list[str | None]) -> list[RequestOutput]:
        collectors = {r.request_id: Collector(r, t, self.tokenizer) for r, t in zip(requests, texts, strict=True)}
        for outputs in self._steps(requests):
            for output in outputs:
                self._push(collectors[output.request_id], output)
        return [c.result for c in collectors.values()]

    def _push(self, collector: Collector, output: SequenceOutput) -> None:
        if collector.push(output):
            self._running.abort(output.request_id, output.choice, FinishReason.STOP)

    def _steps(self, requests: list[Generate]) -> Iterator[list[SequenceOutput]]:
        """Add all requests, or none; then step until the engine is idle. An exception (Ctrl-C too) leaves the engine empty."""
        engine = self._running
        try:
            for request in requests:
                engine.add(request)
            while engine.has_work:
                yield engine.step()
        finally:
            if engine.has_work:
                for request in requests:
                    engine.abort(request.request_id)
                engine.step()
