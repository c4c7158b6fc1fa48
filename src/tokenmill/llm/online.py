"""`AsyncLLM`: many concurrent requests from asyncio, the engine on a thread of the calling process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from tokenmill.core.errors import EngineDied, InvalidRequest, TokenmillError
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.engine import Engine
from tokenmill.llm.outputs import Collector, RequestOutput
from tokenmill.llm.requests import Conversation, Frontend, Prompt, configure
from tokenmill.text.tokenizer import Tokenizer

_Item = SequenceOutput | TokenmillError


class _Feed:
    """Where the outputs of one request go: a queue of the event loop that asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        """Called from the engine's thread. A loop that is closed has no reader any more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


class _EngineThread:
    """Steps an engine while it has work. Requests and aborts are handed over under one lock and taken between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._requests: list[tuple[Generate, _Feed]] = []
        self._aborts: list[tuple[str, int | None, FinishReason]] = []
        self._feeds: dict[str, _Feed] = {}
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Generate, feed: _Feed) -> None:
        with self._wake:
            if self._failure is not None:
                raise EngineDied(f"the engine has failed: {self._failure!r}: make a new AsyncLLM")
            if self._closing:
                raise InvalidRequest("this AsyncLLM is closed: make a new one")
            self._requests.append((request, feed))
            self._wake.notify()

    def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        with self._wake:
            self._aborts.append((request_id, choice, reason))
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take():
                for output in self._engine.step():
                    feed = self._feeds.get(output.request_id)
                    if feed is not None:
                        feed.put(output)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._wake:
                self._closing = True
                for feed in (*self._feeds.values(), *(feed for _, feed in self._requests)):
                    feed.put(EngineDied("the engine was closed while the request was in flight"))
            self._engine.close()

    def _take(self) -> bool:
        """Wait for work and hand it to the engine. False: it is time to end."""
        with self._wake:
            while not (self._requests or self._aborts or self._closing or self._engine.has_work):
                self._wake.wait()
            requests, self._requests = self._requests, []
            aborts, self._aborts = self._aborts, []
        for request, feed in requests:
            try:
                self._engine.add(request)
                self._feeds[request.request_id] = feed
            except TokenmillError as error:
                feed.put(error)
        for request_id, choice, reason in aborts:
            self._engine.abort(request_id, choice, reason)
            if choice is None:
                self._feeds.pop(request_id, None)
        return not self._closing


class AsyncLLM:
    """As `LLM`, for asyncio: requests run side by side and are streamed. Safe to use from any task of one or more loops."""

    def __init__(self, model: str, **settings: Any) -> None:
        config = configure(model, settings)
        engine = build_engine(config)
        self.info = engine.info
        self._frontend = Frontend(config, self.info)
        self._thread = _EngineThread(engine)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 1, cache_salt: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """Yield the result so far after each step, the last time with `finished`. Leaving the iterator early aborts the request.

        Raises `InvalidRequest` at the first step of the iteration for what cannot be served.
        """
        request, text = self._frontend.request(prompt, sampling_params or SamplingParams(), priority, cache_salt)
        return self._stream(request, text)

    def chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None, *, priority: int = 1, cache_salt: str = ""
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for the next answer in a conversation."""
        return self._stream(self._frontend.chat_request(messages, sampling_params or SamplingParams(), priority, cache_salt), None)

    async def close(self) -> None:
        """End what is in flight and free the engine."""
        await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _stream(self, request: Generate, text: str | None) -> AsyncIterator[RequestOutput]:
        feed, collector = _Feed(), Collector(request, text, self.tokenizer)
        self._thread.submit(request, feed)
        try:
            while not collector.result.finished:
                item = await feed.queue.get()
                if isinstance(item, TokenmillError):
                    raise item
                if collector.push(item):
                    self._thread.abort(request.request_id, item.choice, FinishReason.STOP)
                yield collector.result
        finally:
            # Ends whatever is left of the request, and forgets its feed in any case.
            self._thread.abort(request.request_id, None, FinishReason.ABORT)
