"""An engine on a thread of its own, and the queues through which event loops hear of it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from tokenmill.core.errors import EngineDied, TokenmillError, Unavailable
from tokenmill.core.messages import Generate, SequenceOutput
from tokenmill.core.types import FinishReason
from tokenmill.engine.engine import Engine

T = TypeVar("T")


class Feed:
    """Where the outputs of one request go: a queue of the event loop that asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[SequenceOutput | BaseException] = asyncio.Queue()

    async def get(self) -> SequenceOutput:
        """The next output; raises what ended the request instead."""
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def put(self, item: SequenceOutput | BaseException) -> None:
        """Called from any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


class EngineThread:
    """Steps an engine while it has work. Everything else that concerns the engine is done between steps, by `call`.

    The engine lives in the thread's own frame, so that its memory goes when the thread ends.
    """

    def __init__(self, engine: Engine) -> None:
        self._wake = threading.Condition()
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._feeds: dict[str, Feed] = {}
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(engine,), name="tokenmill-engine", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Have `work` done between two steps. The future fails with a `TokenmillError` of the work, or `Unavailable` when
        the thread has ended."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                future.set_exception(self._ending())
            else:
                self._calls.append((work, future))
                self._wake.notify()
        return future

    def submit(self, request: Generate, feed: Feed) -> None:
        """Start a request; its outputs, or the error that refuses or ends it, go to `feed`."""

        def tell_refusal(added: Future[None]) -> None:
            error = added.exception()
            if error is not None:
                feed.put(error)

        with self._wake:
            self._feeds[request.request_id] = feed
            self.call(lambda engine: engine.add(request)).add_done_callback(tell_refusal)

    def stop(self, request_id: str, choice: int) -> None:
        """End one choice: a stop string was found."""
        self.call(lambda engine: engine.abort(request_id, choice, FinishReason.STOP))

    def leave(self, request_id: str) -> None:
        """Forget the feed of a request and end whatever is left of it."""
        with self._wake:
            self._feeds.pop(request_id, None)
        self.call(lambda engine: engine.abort(request_id))

    def close(self) -> None:
        """End the thread, and with it the engine, after the step that is running. Requests in flight fail."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:  # garbage may be collected on any thread
            self._thread.join()

    def _run(self, engine: Engine) -> None:
        try:
            while self._wait(engine):
                outputs = engine.finish_step()
                while self._calls:  # that have come during it, so that they count in the next
                    _do(engine, *self._calls.popleft())
                engine.start_step()
                for output in outputs:
                    feed = self._feeds.get(output.request_id)
                    if feed is not None:
                        feed.put(output)
            engine.close()
        except BaseException as error:  # told to every caller, now and later
            self._failure = error
        finally:
            self._end()

    def _wait(self, engine: Engine) -> bool:
        """Wait for something to do. False: it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._calls or engine.has_work)
            return not self._closing

    def _end(self) -> None:
        with self._wake:
            self._closing = True
            for _, future in self._calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._ending())
            for feed in self._feeds.values():
                feed.put(self._ending())
            self._calls.clear()
            self._feeds.clear()

    def _ending(self) -> TokenmillError:
        """Why there is no engine any more."""
        if self._failure is None:
            return Unavailable("this AsyncLLM is closed: make a new one")
        error = EngineDied(f"the engine has failed ({type(self._failure).__name__}: {self._failure}): make a new AsyncLLM")
        error.__cause__ = self._failure
        return error


def _do(engine: Engine, work: Callable[[Engine], Any], future: Future[Any]) -> None:
    """Do `work` for `future`. An error that is not meant for the caller is the engine's end."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work(engine))
    except TokenmillError as error:
        future.set_exception(error)
    except BaseException as error:
        future.set_exception(error)
        raise
