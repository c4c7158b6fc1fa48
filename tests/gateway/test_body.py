"""Bodies that do not come."""

from __future__ import annotations

import asyncio
import json
import socket

import msgspec
import pytest
import serving
from starlette.requests import Request

from tokenmill.core.errors import RequestTimeout
from tokenmill.gateway import body
from tokenmill.gateway.schemas import DetokenizeRequest


async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_WITHIN", 0.02)
    parts = iter([{"type": "http.request", "body": b'{"model": ', "more_body": True}])

    async def receive() -> dict[str, object]:
        for part in parts:
            return part
        await asyncio.Event().wait()
        raise AssertionError

    request = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(RequestTimeout, match=r"within 0\.02 s \(10 bytes did\)"):
        await body.read_json(request, msgspec.json.Decoder(DetokenizeRequest))


@pytest.mark.parametrize(
    "sent",
    [
        b"this is no HTTP\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["garbage", "length", "chunk"],
)
def test_what_is_no_http_is_refused_in_json(parrot: serving.Served, sent: bytes) -> None:
    host, port = parrot.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert error["code"] == "bad_http"
    assert "not valid HTTP" in error["message"]
