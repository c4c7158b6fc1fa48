"""`AsyncLLM`: many concurrent requests from asyncio, the engine on a thread of the calling process."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any

from tokenmill.core.messages import Generate
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.engine import Engine
from tokenmill.llm.outputs import Collector, RequestOutput
from tokenmill.llm.requests import Conversation, Frontend, Prompt, configure, one_params
from tokenmill.llm.thread import EngineThread, Feed
from tokenmill.observe.kv_cache import kv_cache_stats
from tokenmill.text.templates import choose_template
from tokenmill.text.tokenizer import Tokenizer


class AsyncLLM:
    """As `LLM`, for asyncio: requests run side by side and are streamed. Safe to use from any task of one or more loops.

    Making one takes as long as loading the model; inside a running loop, `await asyncio.to_thread(AsyncLLM, model)`.
    """

    def __init__(self, model: str | os.PathLike[str], *, chat_template: str | None = None, **settings: Any) -> None:
        chosen = None if chat_template is None else choose_template(chat_template)
        config = configure(model, settings)
        engine = build_engine(config)
        self.info = engine.info
        self._frontend = Frontend(config, self.info, chosen)
        self._thread = EngineThread(engine)
        # One that is forgotten, or still open when the interpreter ends, must not leave a thread inside native code.
        weakref.finalize(self, self._thread.close)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._frontend.can_chat

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 1, cache_salt: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the result so far after each step, the last time with `finished`. Leaving the iterator early, or
        cancelling the task, aborts the request and frees its KV.

        priority: 0 is served first, 2 last. cache_salt: only requests with the same one share prefixes. The first step
        of the iteration raises `InvalidRequest` for what cannot be served; any step raises `Unavailable` if the engine
        is closed or fails.
        """
        return self._stream(lambda: self._frontend.request(prompt, one_params(sampling_params), priority, cache_salt))

    def chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None, *, priority: int = 1, cache_salt: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for the next answer in a conversation."""
        return self._stream(lambda: self._frontend.chat_request(messages, one_params(sampling_params), priority, cache_salt))

    async def get_kv_cache_stats(self) -> dict[str, Any]:
        """As `LLM.get_kv_cache_stats`, between two steps."""
        return kv_cache_stats(self.info, await asyncio.wrap_future(self._thread.call(Engine.stats)))

    async def close(self) -> None:
        """Free the engine. Requests in flight raise `Unavailable`."""
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _stream(self, prepare: Callable[[], tuple[Generate, str | None]]) -> AsyncGenerator[RequestOutput, None]:
        # Tokenizing a long prompt would hold up every other stream of the loop.
        request, text = await asyncio.to_thread(prepare)
        feed, collector = Feed(), Collector(request, text, self.tokenizer, self.info)
        self._thread.submit(request, feed)
        try:
            while not collector.finished():
                output = await feed.get()
                if collector.push(output):
                    self._thread.stop(request.request_id, output.choice)
                if collector.failure is None:
                    yield collector.result
        finally:
            self._thread.leave(request.request_id)
