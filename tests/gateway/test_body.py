"""Bodies that do not come."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
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
