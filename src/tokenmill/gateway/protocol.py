"""Refusals below HTTP, in the shape of all others."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenmill.core.errors import InvalidRequest
from tokenmill.gateway.errors import error_response


class JSONProtocol(H11Protocol):
    """uvicorn's protocol, but what cannot be parsed as HTTP is answered by an error body like any other."""

    def send_400_response(self, msg: str) -> None:
        """Answer 400 and close. `msg`: what the parser said."""
        answer = error_response(InvalidRequest(f"the request is not valid HTTP: {msg}", code="bad_http"))
        headers = [*answer.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
