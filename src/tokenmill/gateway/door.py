"""What every request passes first: its id, the key, and a server that is shutting down."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.core.errors import InvalidRequest, TokenmillError
from tokenmill.gateway.errors import error_response
from tokenmill.gateway.service import Service

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""For probes and scrapers: without a key, and answered during a drain too."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Door:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id")
        valid = request_id is not None and _REQUEST_ID.fullmatch(request_id) is not None
        own = request_id if request_id is not None and valid else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = own
            await send(message)

        try:
            if request_id is not None and not valid:
                raise InvalidRequest("X-Request-Id must be 1 to 128 printable ASCII characters without spaces", param="X-Request-Id")
            if scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, send_with_id)
                return
            self._service.check_key(headers.get("authorization"))
            with self._service.admitted():
                await self._app(scope, receive, send_with_id)
        except TokenmillError as error:
            await error_response(error)(scope, receive, send_with_id)
