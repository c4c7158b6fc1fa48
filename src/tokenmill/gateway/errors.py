"""The tree of `core.errors` as HTTP, in one place."""

from __future__ import annotations

import difflib
import http
import logging
import re
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, MethodNotAllowed, RouteNotFound, TokenmillError

log = logging.getLogger(__name__)

RESPONSES: dict[int, str] = {
    400: "The request is not valid as it stands.",
    401: "The API key is missing or wrong.",
    404: "No such route or model.",
    405: "The route has no such method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON by its content type.",
    500: "A fault of the server.",
    503: "Loading, draining, down or saturated: the same request may succeed later.",
}
"""Every status that an error of the tree has."""


class ErrorDetail(msgspec.Struct, kw_only=True):
    """`param` names the offending field, `code` is a stable word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, kw_only=True):
    """The body of every answer that is not a success, and the event that ends a stream early."""

    error: ErrorDetail


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def error_reply(error: TokenmillError) -> ErrorReply:
    return ErrorReply(error=ErrorDetail(message=error.message, type=error.type, param=error.param, code=error.code))


def error_response(error: TokenmillError) -> Response:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(msgspec.json.encode(error_reply(error)), error.status, headers, media_type="application/json")


def internal_error(error: Exception) -> TokenmillError:
    """What a caller learns of a fault of ours: that it is logged."""
    return TokenmillError(f"internal error ({type(error).__name__}): the server's log has the details")


async def on_tokenmill_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenmillError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = error_response(MethodNotAllowed(f"{request.method} is not a method of {path}: use {allowed or 'another one'}"))
        response.headers["Allow"] = allowed
        return response
    if error.status_code == 404:
        return error_response(RouteNotFound(f"there is no route {path}: /openapi.json lists those that exist"))
    return error_response(InvalidRequest(f"{http.HTTPStatus(error.status_code).phrase}: {error.detail}"))


async def on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def on_fault(request: Request, error: Exception) -> Response:
    return error_response(internal_error(error))


T = TypeVar("T", bound=msgspec.Struct)


def decode_body(body: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a request. Raises `InvalidRequest` that names the field and, for an unknown one, the nearest known."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        why = _small(str(error)) if body else "it is empty"
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {why}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: it is nested too deeply", code="invalid_json") from None


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_WRONG = re.compile(r"(?P<why>.*?)(?: - at (?:`key` in )?`(?P<path>.*)`)?$", re.DOTALL)


def _invalid_field(message: str, schema: Any) -> InvalidRequest:
    if match := _UNKNOWN.match(message):
        name = _join(match["path"], match["field"])
        known = [field.encode_name for field in msgspec.structs.fields(schema)]
        near = [] if match["path"] else difflib.get_close_matches(match["field"], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else "it is not a field of this request: leave it out"
        return InvalidRequest(f"unknown field {name!r}: {hint}", param=name, code="unknown_field")
    if match := _MISSING.match(message):
        name = _join(match["path"], match["field"])
        return InvalidRequest(f"{name} is missing: it is required", param=name, code="missing_field")
    match = _WRONG.match(message)
    assert match is not None
    name = _join(match["path"], "")
    why = _small(match["why"].replace("`", ""))
    return InvalidRequest(f"{name or 'the body'}: {why}", param=name or None, code="invalid_type")


def _join(path: str | None, field: str) -> str:
    """`$.messages[0]` and `role` are `messages[0].role`."""
    parent = (path or "").removeprefix("$").removeprefix(".")
    return ".".join(part for part in (parent, field) if part)


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]
