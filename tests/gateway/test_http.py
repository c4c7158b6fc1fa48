"""HTTP as clients send it over a bare connection, well formed and not."""

from __future__ import annotations

import contextlib
import json
import re
import socket

import h11
import pytest
import serving

from tokenmill.gateway.protocol import MAX_HEAD, Connection

BODY = json.dumps({"model": "parrot", "prompt": "abc", "max_tokens": 3}).encode()
STREAM = json.dumps({"model": "parrot", "prompt": "abc", "max_tokens": 3, "stream": True}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def post(body: bytes, *headers: bytes, version: bytes = b"1.1", length: int | None = None) -> bytes:
    """A request for a completion. `length`: what it says of its body's length; None for the truth, -1 for nothing."""
    lines = [b"POST /v1/completions HTTP/" + version, b"Host: x", b"Content-Type: application/json", *headers]
    if length != -1:
        lines.append(b"Content-Length: %d" % (len(body) if length is None else length))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def connect(served: serving.Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def talk(served: serving.Served, *parts: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with connect(served) as connection:
        with contextlib.suppress(OSError):  # it may close before it has everything
            for part in parts:
                connection.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"5;x=y\r\n" + BODY[:5] + b"\r\n%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\nA: trailer\r\n\r\n"
UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")


@pytest.mark.parametrize(
    "sent",
    [
        post(BODY),
        post(CHUNKS, CHUNKED, length=-1),
        post(BODY, *UPGRADE),  # as Java's HttpClient asks for HTTP/2: in vain, but its request stands
        post(BODY, b"Connection: Upgrade", b"Upgrade: websocket"),
    ],
    ids=["length", "chunks", "h2c", "websocket"],
)
def test_a_body_is_read_and_the_next_request_of_the_connection_too(parrot: serving.Served, sent: bytes) -> None:
    answer = talk(parrot, sent + sent + HEALTH)
    assert statuses(answer) == [200, 200, 200]
    assert answer.count(b'"completion_tokens":3') == 2
    assert answer.endswith(b'{"status":"ok"}')


def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(parrot: serving.Served) -> None:
    head, _, body = post(BODY, b"Expect: 100-continue", b"Connection: close").partition(b"\r\n\r\n")
    with connect(parrot) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_stream_comes_in_chunks_of_one_event(parrot: serving.Served) -> None:
    head, _, body = talk(parrot, post(STREAM, b"Connection: close")).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    events = []
    while body:
        size, _, body = body.partition(b"\r\n")
        events.append(body[: int(size, 16)])
        assert body[len(events[-1]) :][:2] == b"\r\n"
        body = body[len(events[-1]) + 2 :]
    assert events.pop() == b""
    assert events.pop() == b"data: [DONE]\n\n"
    assert all(event.startswith(b"data: {") and event.endswith(b"}\n\n") for event in events)
    assert len(events) == 4


def test_a_piece_of_no_bytes_ends_no_stream() -> None:
    connection = Connection(h11.SERVER)
    connection.receive_data(HEALTH)
    assert isinstance(connection.next_event(), h11.Request)
    connection.send(h11.Response(status_code=200, headers=[]))
    pieces = [connection.send(h11.Data(data=data)) for data in (b"a", b"", b"bc")]
    assert [*pieces, connection.send(h11.EndOfMessage())] == [b"1\r\na\r\n", b"", b"2\r\nbc\r\n", b"0\r\n\r\n"]
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"d"))


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(parrot: serving.Served) -> None:
    head, _, body = talk(parrot, post(STREAM, version=b"1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert all(line.startswith(b"data: ") for line in body.split(b"\n\n")[:-1])
    assert body.endswith(b"\n\ndata: [DONE]\n\n")


def test_head_has_no_body(parrot: serving.Served) -> None:
    answer = talk(parrot, b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [200]
    assert answer.endswith(b"\r\n\r\n")


def test_what_cannot_be_parsed_does_not_spoil_the_answer_before_it(parrot: serving.Served) -> None:
    answer = talk(parrot, post(STREAM), b"\0 garbage\r\n\r\n")
    assert statuses(answer) == [200, 400]
    assert b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 400 " in answer


@pytest.mark.parametrize(
    "sent",
    [
        post(BODY, b"Content-Length: 5"),
        post(CHUNKS, CHUNKED, length=5),
        post(CHUNKS, b"Transfer-Encoding: chunked, identity", length=-1),
        post(CHUNKS, b"Transfer-Encoding: xchunked", length=-1),
        post(BODY, b"A: b\0c"),
        post(BODY, b"A : b"),
        post(BODY, b": b"),
        post(b"-1\r\n", CHUNKED, length=-1),
        HEALTH.replace(b"Host: x\r\n", b""),
        HEALTH.replace(b"Host: x", b"Host: x\r\nHost: y"),
    ],
    ids=["lengths", "length and chunks", "not chunked last", "xchunked", "NUL", "space", "no name", "negative chunk", "no host", "hosts"],
)
def test_what_others_may_read_differently_is_refused(parrot: serving.Served, sent: bytes) -> None:
    answer = talk(parrot, sent)
    assert statuses(answer) == [400]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"


def test_nothing_behind_a_body_of_two_framings_is_answered(parrot: serving.Served) -> None:
    assert statuses(talk(parrot, post(CHUNKS, CHUNKED, length=5) + HEALTH)) == [400]


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /", b"x" * MAX_HEAD],
        [b"GET /health HTTP/1.1\r\n", *[b"A: " + b"b" * 1000 + b"\r\n"] * 70],
        [b"GET /health HTTP/1.1\r\nA:", b"b" * MAX_HEAD],
        [post(b"5;", CHUNKED, length=-1), b"x" * MAX_HEAD],
        [post(b"0\r\n", CHUNKED, length=-1), *[b"A: " + b"b" * 1000 + b"\r\n"] * 70],
    ],
    ids=["line", "headers", "header", "chunk extension", "trailers"],
)
def test_a_head_without_end_is_given_up(parrot: serving.Served, parts: list[bytes]) -> None:
    assert statuses(talk(parrot, *parts)) == [400]


def test_a_client_that_leaves_behind_a_second_request_ends_its_first() -> None:
    endless = json.dumps({"model": "parrot", "prompt": "abc", "ignore_eos": True, "stream": True}).encode()
    with serving.scripted(script={"step_seconds": 0.002, "max_model_len": 10**6}) as served:
        with connect(served) as connection:
            connection.sendall(post(endless) + HEALTH)
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        serving.until(lambda: served.metric("num_requests_running") == 0)
