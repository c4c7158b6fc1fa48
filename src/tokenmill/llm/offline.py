"""`LLM`: batches of prompts, answered in the calling process."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tokenmill.core.errors import InvalidRequest, Unavailable
from tokenmill.core.messages import Generate
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.engine import Engine
from tokenmill.llm.interrupts import interrupts_held
from tokenmill.llm.outputs import Collector, RequestOutput
from tokenmill.llm.requests import Conversation, Frontend, Prompt, configure, many_conversations, many_params, many_prompts, one_params
from tokenmill.observe.kv_cache import kv_cache_stats
from tokenmill.text.templates import choose_template
from tokenmill.text.tokenizer import Tokenizer


class LLM:
    """A model, ready to generate.

    model: a catalogue name (`smollm2:135m`), `hf:org/repo[:file]`, or the path of a .gguf file or a Hugging Face
    folder. chat_template: `chatml` or the path of a Jinja file, instead of the model's own. settings: those of
    `EngineConfig`, as keywords; an unknown one raises `ConfigError` naming the nearest.

    Threads may share it: their requests run side by side. Use it as a context manager, or call `close`, to give its memory back.
    """

    def __init__(self, model: str | os.PathLike[str], *, chat_template: str | None = None, **settings: Any) -> None:
        chosen = None if chat_template is None else choose_template(chat_template)
        config = configure(model, settings)
        self._engine: Engine | None = build_engine(config)
        self.info = self._engine.info
        self._frontend = Frontend(config, self.info, chosen)
        self._collectors: dict[str, Collector] = {}
        self._lock = threading.RLock()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._frontend.can_chat

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt (a string, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`); results in the
        order of the prompts.

        Raises `InvalidRequest` for a prompt or parameter that cannot be served; then nothing has been generated.
        """
        given = many_prompts(prompts)
        params = many_params(sampling_params, len(given))
        return self._finish([self._frontend.request(p, s) for p, s in zip(given, params, strict=True)])

    def chat(
        self, messages: Conversation | Sequence[Conversation], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of `{"role", "content"}`), or several. Raises as `generate`."""
        given = many_conversations(messages)
        params = many_params(sampling_params, len(given))
        return self._finish([self._frontend.chat_request(m, p) for m, p in zip(given, params, strict=True)])

    def stream_generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[tuple[str, RequestOutput], None, None]:
        """Complete one prompt, yielding the text that was added and the result so far, the last time with `finished`.

        Closing the generator early aborts the request. Several may be open at once: each step serves all of them.
        Raises as `generate`, and for more than one choice.
        """
        return self._stream(*self._frontend.request(prompt, _one_choice(sampling_params)))

    def stream_chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None
    ) -> Generator[tuple[str, RequestOutput], None, None]:
        """As `stream_generate`, for the next answer in a conversation."""
        return self._stream(*self._frontend.chat_request(messages, _one_choice(sampling_params)))

    def apply_chat_template(self, messages: Conversation) -> list[int]:
        """Token ids of the prompt that `chat` makes of a conversation."""
        return self._frontend.chat_ids(messages)

    def get_kv_cache_stats(self) -> dict[str, Any]:
        """What the KV cache holds, by page size and format, what it saves, and what has happened in it: see docs/kv-cache.md."""
        with self._turn():
            return kv_cache_stats(self.info, self._running.stats())

    def close(self) -> None:
        """Free the weights and the KV pool. The object is of no use afterwards."""
        with self._turn():
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
            raise Unavailable("this LLM is closed: make a new one")
        return self._engine

    def _finish(self, requests: list[tuple[Generate, str | None]]) -> list[RequestOutput]:
        with self._serving(requests) as collectors:
            for collector in collectors:
                while not collector.finished():
                    self._step()
        return [collector.result for collector in collectors]

    def _stream(self, request: Generate, text: str | None) -> Generator[tuple[str, RequestOutput], None, None]:
        with self._serving([(request, text)]) as [collector]:
            result, shown = collector.result, 0
            choice = result.outputs[0]
            while True:
                while not collector.finished() and len(choice.text) == shown:
                    self._step()
                last, new = result.finished, choice.text[shown:]
                shown += len(new)
                yield new, result
                if last:
                    return

    @contextmanager
    def _serving(self, requests: list[tuple[Generate, str | None]]) -> Iterator[list[Collector]]:
        """Have the engine accept all requests, or none. What is not finished at the end, or at an exception, is aborted."""
        engine = self._running
        collectors = [Collector(request, text, self.tokenizer, self.info) for request, text in requests]
        try:
            with self._turn():
                for collector in collectors:
                    engine.add(collector.request)
                    self._collectors[collector.request.request_id] = collector
            del engine  # a suspended generator must not keep a closed engine's memory
            yield collectors
        finally:
            with self._turn():
                for request, _ in requests:
                    self._collectors.pop(request.request_id, None)
                    if self._engine is not None:
                        self._engine.abort(request.request_id)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine for this thread alone, undisturbed from before it waits for its turn. A generator that garbage collection ends
        may be inside its own thread's."""
        with interrupts_held(), self._lock:
            yield

    def _step(self) -> None:
        with self._turn():
            engine = self._running
            for output in engine.step():
                collector = self._collectors.get(output.request_id)
                if collector is not None and collector.push(output):
                    engine.abort(output.request_id, output.choice, FinishReason.STOP)


def _one_choice(given: SamplingParams | None) -> SamplingParams:
    params = one_params(given)
    if params.n != 1:
        raise InvalidRequest(f"n is {params.n}, but a stream has one choice: leave it out, or use generate or chat", param="n")
    return params
