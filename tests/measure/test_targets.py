from __future__ import annotations

from collections.abc import Iterator

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


async def test_a_server_that_dies_in_a_stream_is_an_error(tmp_path: object) -> None:
    with serving.scripted(script={"exit_at": 3, "once": f"{tmp_path}/once"}) as served:
        record = await answer(target(served.url), Ask("hello", 50))
    assert record.error is not None
    assert record.error.startswith("in the stream: ")
    assert record.ended is not None


async def test_nobody_listening_is_an_error_of_the_request() -> None:
    record = await answer(target("http://127.0.0.1:9"), Ask("hello", 5))
    assert record.error is not None
    assert record.error.startswith("ConnectError")


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
