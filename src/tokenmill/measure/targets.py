"""Whatever answers a prompt as a stream: an engine in this process, or any OpenAI-compatible server."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from tokenmill.core.errors import ConfigError, InvalidRequest, TokenmillError, Unavailable
from tokenmill.core.types import SamplingParams
from tokenmill.llm import AsyncLLM
from tokenmill.measure.serving import Record
from tokenmill.measure.workload import Ask

Endpoint = Literal["completions", "chat"]

now = time.monotonic

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
CONNECT_SECONDS = 10.0


class Target(Protocol):
    """Answers, and says in the record when each piece of text came, how many tokens there were, and what went wrong."""

    async def send(self, ask: Ask, record: Record) -> None: ...


class EngineTarget:
    """An engine in this process; every token is a piece."""

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


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class ServerTarget:
    """A server; `base` is its URL up to `/v1`. An async context manager.

    ignore_eos: ask for answers of full length, which OpenAI's own service does not know and refuses.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, endpoint: Endpoint, ignore_eos: bool) -> None:
        self.base = base_url(url)
        self.model = model
        self._endpoint, self._ignore_eos = endpoint, ignore_eos
        self._path = "/chat/completions" if endpoint == "chat" else "/completions"
        self._decoder = msgspec.json.Decoder(_Event)
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            verify=self.base.startswith("https"),
            # A proxy has no business between two processes of one machine.
            trust_env=urlsplit(self.base).hostname not in LOCAL_HOSTS,
        )

    async def __aenter__(self) -> ServerTarget:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

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
            async with self._http.stream("POST", self.base + self._path, json=self._body(ask)) as response:
                if response.status_code == 200:
                    await self._follow(response, record)
                else:
                    record.error = refusal(response.status_code, await response.aread())
        except httpx.HTTPError as error:
            record.error = _named(error)
        record.ended = now()

    async def _follow(self, response: httpx.Response, record: Record) -> None:
        ended = False
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or not data:
                continue
            if data == "[DONE]":
                ended = True
                continue
            arrived = now()
            try:
                event = self._decoder.decode(data)
            except msgspec.DecodeError as error:
                record.error = f"an event that is not understood: {error}"
                return
            if event.error is not None:
                record.error = f"in the stream: {_message(event.error)}"
                return
            if any(choice.has_text for choice in event.choices or ()):
                record.times.append(arrived)
            if event.usage is not None:
                details = event.usage.prompt_tokens_details
                record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
                record.cached_tokens = details.cached_tokens if details else None
        if not ended:
            record.error = "the stream ended before its end"
        elif not record.output_tokens:
            record.output_tokens = len(record.times)

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
            answer = await self._http.get(self.base + "/models")
        except httpx.HTTPError as error:
            raise Unavailable(f"cannot reach {self.base}: {_named(error)}: is the server running, and is --url right?") from None
        if answer.status_code != 200:
            raise InvalidRequest(f"{self.base}/models: {refusal(answer.status_code, answer.content)}: name the model with --model")
        try:
            names = [model["id"] for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"{self.base}/models is not OpenAI's list of models: name the model with --model") from None
        if len(names) != 1:
            raise InvalidRequest(f"{self.base} serves {len(names)} models: choose one with --model: {', '.join(map(str, names))}")
        return str(names[0])


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
        said = _message(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        said = body[:200].decode(errors="replace").strip()
    return f"HTTP {status}: {said}" if said else f"HTTP {status}"


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _named(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
