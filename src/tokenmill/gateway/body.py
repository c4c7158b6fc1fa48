"""Bodies in and out: bounded, JSON, UTF-8."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenmill.core.errors import BodyTooLarge, InvalidRequest, RequestTimeout, UnsupportedMediaType
from tokenmill.gateway.errors import ClientGone, decode_body

MAX_BODY = 8 * 2**20
"""Bytes. A context of a million tokens fits; what is larger would be decoded in one call that holds up every other request."""

BODY_WITHIN = 30.0
"""Seconds for a body to arrive, so that clients which never finish theirs do not fill the server."""

T = TypeVar("T", bound=msgspec.Struct)


def json_response(reply: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(reply), status, media_type="application/json")


async def read_json(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The request's body, decoded. Raises `TokenmillError` for one that is too large or not what the route takes."""
    _check_headers(request)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise _too_large("more than that")
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {BODY_WITHIN:g} s ({len(body)} bytes did): send it again") from None
    return decode_body(body, decoder)


def _check_headers(request: Request) -> None:
    """What can be refused before the body is read. A body without a content type is taken for JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(f"content type is {kind!r}: send JSON with the header 'Content-Type: application/json'")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise UnsupportedMediaType(f"content encoding is {coding!r}: send the body as it is, without the header 'Content-Encoding'")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal():
        raise InvalidRequest(f"content-length is {length!r}, but must be a number of bytes")
    if int(length) > MAX_BODY:
        raise _too_large(f"{length} bytes")


def _too_large(what: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {MAX_BODY} bytes ({what}): send less in one request")
