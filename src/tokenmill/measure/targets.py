"""Whatever answers a prompt as a stream: an engine in this process, or any OpenAI-compatible server."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Literal, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec

from tokenmill.core.errors import ConfigError, InvalidRequest, TokenmillError, Unavailable
from tokenmill.core.types import SamplingParams
from tokenmill.llm import AsyncLLM
from tokenmill.measure.events import EventReader, message
from tokenmill.measure.serving import Record
from tokenmill.measure.workload import Ask

Endpoint = Literal["completions", "chat"]

now = time.monotonic

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 4.0
"""After which a connection is not used again: many servers close theirs after 5, which a request on its way would run into."""

Fault = (aiohttp.ClientError, ValueError)
"""What a request may fail with; the second if the URL or the key is not such that it can be sent."""


class Target(Protocol):
    """Answers, and says in the record when each piece of text came, how many tokens there were, and what went wrong."""

    async def send(self, ask: Ask, record: Record) -> None: ...


class EngineTarget:
    """An engine in this process; what a step adds is a piece: one token, or several where it speculates."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def send(self, ask: Ask, record: Record) -> None:
        params = SamplingParams(temperature=0, seed=0, ignore_eos=True, max_tokens=ask.max_tokens)
        record.sent = now()
        try:
            async for result in self._llm.generate(ask.prompt, params):
                if len(result.outputs[0].token_ids) > record.output_tokens:
                    record.times.append(now())
                usage = result.usage
                record.output_tokens, record.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
                record.cached_tokens = usage.cached_tokens
        except TokenmillError as error:
            record.error = str(error)
        record.ended = now()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ServerTarget:
    """A server; `base` is its URL up to `/v1`. An async context manager.

    ignore_eos: ask for answers of full length, which OpenAI's own service does not know and refuses.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, endpoint: Endpoint, ignore_eos: bool) -> None:
        self.base = base_url(url)
        self.model = model
        self._endpoint, self._ignore_eos = endpoint, ignore_eos
        self._path = "/chat/completions" if endpoint == "chat" else "/completions"
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> ServerTarget:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            # Not trust_env, which would look at the environment again for each request, and for a password in ~/.netrc.
            proxy=_proxy(self.base),
        )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.close()

    async def check(self) -> None:
        """Find the model's name if none was given, and have one short answer, so that nothing is measured in vain.

        Raises `Unavailable` with what went wrong, `InvalidRequest` if the model cannot be found out.
        """
        if self.model is None:
            self.model = await self._only_model()
        record = Record(now())
        await self.send(Ask("The quick brown fox", 2), record)
        if record.error is not None:
            advice = "is the server running, and are --url, --model and --endpoint right?"
            raise Unavailable(f"{self.base}{self._path} did not answer a first request: {record.error}: {advice}")

    async def send(self, ask: Ask, record: Record) -> None:
        record.sent = now()
        try:
            async with self._http.post(self.base + self._path, json=self._body(ask), allow_redirects=False) as response:
                if response.status == 200:
                    await self._follow(response, record)
                else:
                    record.error = refusal(response.status, await response.read())
        except Fault as error:
            record.error = _named(error)
        record.ended = now()

    async def _follow(self, response: aiohttp.ClientResponse, record: Record) -> None:
        reader = EventReader(record)
        async for chunk in response.content.iter_any():
            reader.feed(chunk, now())
            if record.error is not None:
                return
        reader.end(now())

    def _body(self, ask: Ask) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": ask.prompt}]}
        return body | {"prompt": ask.prompt}

    async def _only_model(self) -> str:
        try:
            async with self._http.get(self.base + "/models", allow_redirects=False) as response:
                status, body = response.status, await response.read()
        except Fault as error:
            raise Unavailable(f"cannot reach {self.base}: {_named(error)}: is the server running, and is --url right?") from None
        if status != 200:
            raise InvalidRequest(f"{self.base}/models: {refusal(status, body)}: name the model with --model")
        try:
            names = [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except msgspec.DecodeError:
            raise InvalidRequest(f"{self.base}/models is not OpenAI's list of models: name the model with --model") from None
        if len(names) != 1:
            raise InvalidRequest(f"{self.base} serves {len(names)} models: choose one with --model: {', '.join(names)}")
        return names[0]


def base_url(url: str) -> str:
    """The URL with which all paths begin; a bare `http://host:port` means its `/v1`. Raises `ConfigError`."""
    parts = urlsplit(url)
    try:
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        raise ConfigError(f"--url is {url!r}, but must be like http://127.0.0.1:8000 or https://host/v1", param="url")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def refusal(status: int, body: bytes) -> str:
    """An HTTP error in a line, with the server's own words if it has some."""
    try:
        said = message(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        said = body[:200].decode(errors="replace").strip()
    return f"HTTP {status}: {said}" if said else f"HTTP {status}"


def _named(error: Exception) -> str:
    """In one line, though some have a picture of what they found wrong; without the host, which the reader has named."""
    said = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return f"{type(error).__name__}: {' '.join(str(said).split())}".rstrip(": ")


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for `url`; none for this machine, between whose processes it has no business."""
    parts = urlsplit(url)
    if not parts.hostname or parts.hostname in LOCAL_HOSTS or proxy_bypass(parts.hostname):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"
