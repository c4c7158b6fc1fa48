"""Server-sent events, and work that ends when its client goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.core.errors import TokenmillError
from tokenmill.gateway.errors import ClientGone, error_reply, internal_error

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects a stream defeats it
]

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled at once when the client disconnects; then raises `ClientGone`.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Structs as server-sent events, ended by `[DONE]`.

    The answer begins with the first event, so that a request which is refused before it gets a plain error. An error
    after that is an event of its own.
    """

    def __init__(self, events: AsyncGenerator[msgspec.Struct, None]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await _send_event(send, first)
            try:
                async for event in events:
                    await _send_event(send, event)
            except TokenmillError as error:
                await _send_event(send, error_reply(error))
            except Exception as error:
                log.exception("a stream failed")
                await _send_event(send, error_reply(internal_error(error)))
            await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _send_event(send: Send, event: msgspec.Struct) -> None:
    body = b"data: " + msgspec.json.encode(event) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
