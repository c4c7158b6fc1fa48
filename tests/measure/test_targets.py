from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import serving

from tokenmill.core.errors import ConfigError, InvalidRequest, Unavailable
from tokenmill.measure.serving import Record
from tokenmill.measure.targets import Endpoint, ServerTarget, base_url, now, refusal
from tokenmill.measure.workload import Ask


@pytest.fixture(scope="module")
def parrot() -> Iterator[serving.Served]:
    """A server that answers with what it was told, a byte a token."""
    with serving.scripted() as served:
        yield served


EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunks(*datas: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in datas)


WHOLE = STREAM + chunks(EVENT, DONE) + b"0\r\n\r\n"


class Stub:
    """Answers every request with the same writes, once `together` are with it; keeps what it was asked, and by how many connections."""

    def __init__(self, writes: list[bytes], keep: bool, together: int) -> None:
        self.url = ""
        self.asked: list[tuple[str, bytes]] = []
        self.connections = 0
        self._writes, self._keep = writes, keep
        self._together = asyncio.Barrier(together)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:")), 0)
                self.asked.append((head, await reader.readexactly(length)))
                await self._together.wait()
                for part in self._writes:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if not self._keep:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def stub(*writes: bytes, keep: bool = False, together: int = 1) -> AsyncIterator[Stub]:
    """A server on a socket of this process; it closes a connection after an answer unless told to keep it."""
    made = Stub(list(writes), keep, together)
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0, backlog=200) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


def target(url: str, model: str | None = "parrot", endpoint: Endpoint = "completions", key: str | None = None) -> ServerTarget:
    return ServerTarget(url, model, key, endpoint, ignore_eos=True)


async def answer(server: ServerTarget, ask: Ask) -> Record:
    record = Record(now())
    async with server:
        await server.send(ask, record)
    return record


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("https://host/openai/v2", "https://host/openai/v2"),
    ],
)
def test_a_bare_url_means_its_v1(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:99999", "http://host:x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url is"):
        base_url(url)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_stream_is_counted_by_the_servers_usage(parrot: serving.Served, endpoint: Endpoint) -> None:
    record = await answer(target(parrot.url, endpoint=endpoint), Ask("héllo", 9))
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (6, 9, 0)
    # é is two tokens that come as one piece of text; the others come one by one, or together if the client was late
    assert 1 < len(record.times) <= 8
    assert record.times == sorted(record.times)
    assert record.sent is not None
    assert record.ended is not None
    assert record.scheduled <= record.sent <= record.times[0] <= record.times[-1] <= record.ended


async def test_a_refusal_is_an_error_in_the_servers_words(parrot: serving.Served) -> None:
    record = await answer(target(parrot.url), Ask("hello", 5000))
    assert record.error is not None
    assert record.error.startswith("HTTP 400: prompt has 5 tokens, model context is 4096")
    assert not record.completed


async def test_an_engine_that_dies_over_and_over_in_a_stream_is_an_error() -> None:
    with serving.scripted(script={"exit_at": 3}) as served:
        record = await answer(target(served.url), Ask("hello", 50))
    assert record.error is not None
    assert record.error.startswith("in the stream: ")
    assert record.ended is not None


async def test_nobody_listening_is_an_error_of_the_request() -> None:
    record = await answer(target("http://127.0.0.1:9"), Ask("hello", 5))
    assert record.error is not None
    assert record.error.startswith("ClientConnectorError: ")
    assert record.error.endswith("Connect call failed ('127.0.0.1', 9)")
    assert record.ended is not None


async def test_an_ask_is_one_request_with_all_that_was_said() -> None:
    async with stub(WHOLE) as server:
        assert (await answer(target(server.url, key="sesame"), Ask("héllo", 5))).error is None
    ((head, body),) = server.asked
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    lines = head.lower().splitlines()
    assert "authorization: bearer sesame" in lines
    assert "content-type: application/json" in lines
    said = {"model": "parrot", "prompt": "héllo", "max_tokens": 5, "temperature": 0, "stream": True, "ignore_eos": True}
    assert msgspec.json.decode(body) == said | {"stream_options": {"include_usage": True}}


async def test_a_stream_may_come_in_any_pieces() -> None:
    record = None
    for writes in ([WHOLE], [bytes([byte]) for byte in WHOLE], [STREAM + chunks(EVENT[:9], EVENT[9:] + DONE) + b"0\r\n\r\n"]):
        async with stub(*writes) as server:
            record = await answer(target(server.url), Ask("hello", 5))
        assert record.error is None
        assert (len(record.times), record.output_tokens) == (1, 1)


async def test_a_line_may_be_as_long_as_it_likes() -> None:
    event = b'data: {"choices": [{"text": "' + b"x" * 3_000_000 + b'"}]}\n\n'
    async with stub(STREAM, chunks(event, event + DONE), b"0\r\n\r\n") as server:
        record = await answer(target(server.url), Ask("hello", 5))
    assert record.error is None
    assert len(record.times) == 2


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (STREAM + chunks(EVENT), "ClientPayloadError: Response payload is not completed"),
        (STREAM + chunks(EVENT)[:-9], "ClientPayloadError: Response payload is not completed"),
        (STREAM + chunks(EVENT) + b"0\r\n\r\n", "the stream ended before its end"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + EVENT, "the stream ended before its end"),
        (b"", "ServerDisconnectedError: Server disconnected"),
        (b"SSH-2.0-OpenSSH\r\n", "ClientResponseError: 400, message="),
    ],
)
async def test_a_stream_that_breaks_off_is_an_error_in_a_line(sent: bytes, error: str) -> None:
    async with stub(sent) as server:
        record = await answer(target(server.url), Ask("hello", 5))
    assert record.error is not None
    assert record.error.startswith(error)
    assert "\n" not in record.error
    assert record.ended is not None


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (b"400 Bad Request", b'{"error": {"message": "too long", "type": "invalid_request_error"}}', "HTTP 400: too long"),
        (b"502 Bad Gateway", b"<html>\n<h1>Bad Gateway</h1></html>\n", "HTTP 502: <html>\n<h1>Bad Gateway</h1></html>"),
        # A POST that follows would become a GET, or measure another server.
        (b"307 Temporary Redirect\r\nlocation: /v1/elsewhere", b"", "HTTP 307"),
    ],
)
async def test_an_http_error_is_told_with_its_body(status: bytes, body: bytes, error: str) -> None:
    async with stub(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(body)), body) as server:
        record = await answer(target(server.url), Ask("hello", 5))
        async with target(server.url, model=None) as asking:
            with pytest.raises(InvalidRequest, match=f"/v1/models: {error}: name the model with --model"):
                await asking.check()
    assert record.error == error
    assert len(server.asked) == 2


@pytest.mark.parametrize("body", [b"<html>", b'{"data": [{}]}', b'["x"]'])
async def test_what_is_no_list_of_models_is_told(body: bytes) -> None:
    async with (
        stub(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)) as server,
        target(server.url, model=None) as asking,
    ):
        with pytest.raises(InvalidRequest, match="/v1/models is not OpenAI's list of models: name the model with --model"):
            await asking.check()


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    async with stub(WHOLE, keep=True) as server:
        async with target(server.url) as asking:
            for _ in range(3):
                record = Record(now())
                await asking.send(Ask("hello", 5), record)
                assert record.error is None
        assert (server.connections, len(server.asked)) == (1, 3)


async def test_requests_wait_for_no_connection() -> None:
    many = 150
    async with stub(WHOLE, together=many) as server, target(server.url) as asking:
        records = [Record(now()) for _ in range(many)]
        await asyncio.wait_for(asyncio.gather(*(asking.send(Ask("hello", 5), record) for record in records)), 30)
    assert [record.error for record in records] == [None] * many
    assert server.connections == many


async def test_a_proxy_is_for_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = tmp_path / "netrc"
    secrets.write_text("default login someone password something\n")
    secrets.chmod(0o600)
    monkeypatch.setenv("NETRC", str(secrets))
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with stub(WHOLE) as proxy, stub(WHOLE) as server:
        monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://"))
        assert (await answer(target(server.url), Ask("hello", 5))).error is None
        assert (len(server.asked), len(proxy.asked)) == (1, 0)
        assert (await answer(target("http://0.0.0.0:9", key="sesame"), Ask("hello", 5))).error is None
        ((head, _),) = proxy.asked
        assert head.startswith("POST http://0.0.0.0:9/v1/completions HTTP/1.1\r\n")
        assert "authorization: bearer sesame" in head.lower().splitlines()
        monkeypatch.setenv("no_proxy", "0.0.0.0")
        record = await answer(target("http://0.0.0.0:9"), Ask("hello", 5))
        assert record.error is not None
        assert record.error.endswith("Connect call failed ('0.0.0.0', 9)")
        assert len(proxy.asked) == 1


@pytest.mark.parametrize(("url", "key"), [("http://127.0.0.1:9", "two\nlines"), ("http://some..host", None)])
async def test_what_cannot_be_sent_is_an_error_of_the_request(url: str, key: str | None) -> None:
    record = await answer(target(url, key=key), Ask("hello", 5))
    assert record.error
    assert record.ended is not None


async def test_the_first_request_finds_out_what_is_wrong() -> None:
    async with target("http://127.0.0.1:9") as server:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9/v1/completions did not answer .* is the server running"):
            await server.check()
    async with target("http://127.0.0.1:9", model=None) as server:
        with pytest.raises(Unavailable, match=r"cannot reach http://127\.0\.0\.1:9/v1"):
            await server.check()


async def test_a_model_must_be_named_if_there_are_several(parrot: serving.Served) -> None:
    async with target(parrot.url, model=None) as server:
        with pytest.raises(InvalidRequest, match="serves 2 models: choose one with --model: parrot, polly"):
            await server.check()


async def test_the_key_is_sent() -> None:
    with serving.scripted(api_key="sesame") as served:
        async with target(served.url, key="sesame") as server:
            await server.check()
        async with target(served.url, key="simsalabim") as server:
            with pytest.raises(Unavailable, match="HTTP 401"):
                await server.check()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no"}}', "HTTP 500: no"),
        (b'{"error": "no"}', "HTTP 500: no"),
        (b"<html>", "HTTP 500: <html>"),
        (b'["x"]', 'HTTP 500: ["x"]'),
        (b"", "HTTP 500"),
    ],
)
def test_any_body_of_an_error_makes_a_line(body: bytes, text: str) -> None:
    assert refusal(500, body) == text
