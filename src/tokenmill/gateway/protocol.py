"""HTTP itself, where uvicorn's and h11's way of it is not ours."""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenmill.core.errors import InvalidRequest
from tokenmill.gateway.errors import error_response

MAX_HEAD = 64 * 2**10
"""Bytes of a request line and its headers; a longer head is refused before it is complete."""


class JSONProtocol(H11Protocol):
    """uvicorn's protocol, but what cannot be parsed as HTTP is answered by an error body like any other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Connection(h11.SERVER, MAX_HEAD)

    def send_400_response(self, msg: str) -> None:
        """Answer 400 and close. `msg`: what the parser said."""
        answer = error_response(InvalidRequest(f"the request is not valid HTTP: {msg}", code="bad_http"))
        headers = [*answer.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Connection(h11.Connection):
    """h11's, but a body of two lengths is refused, and the chunks of a body are framed here: they change none of its states, and a
    stream sends one per token."""

    _in_chunks = False

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Request and {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            # A proxy that believes the other one would see another request begin (RFC 9112, 6.1).
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        return event

    def send(self, event: h11.Event) -> Any:
        if self._in_chunks and type(event) is h11.Data and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        sent: Any = super().send(event)
        if type(event) is h11.Response:
            self._in_chunks = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent
