"""Clients that ask, read, and leave, and hold every word against the answer that it should be."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec
import openai
from lived import Lived
from questions import Question

LONGEST = 300.0
"""Seconds for an answer or an error. What a server may let a client wait for adds up: a worker that is stopped is left after ten, one that
is gone is waited for for thirty, several times, and machines are slow."""

HONEST = {"unavailable", "engine_died"}
"""Errors that a request which is right may get, by code: it was accepted or not, and is not answered."""


class Wrong(Exception):
    """An answer that must not be."""


class _Heard:
    """What has come of one answer. Raises `Wrong`, as soon as it is."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._texts = [""] * question.params.n
        self._tokens: list[tuple[int, ...]] = [()] * question.params.n
        self._ends: list[str | None] = [None] * question.params.n

    def part(self, index: int, text: str, tokens: Sequence[int], finish_reason: str | None) -> None:
        if self._ends[index] is not None:
            raise Wrong(f"choice {index} has ended ({self._ends[index]}), and goes on with {text!r}, {finish_reason}")
        expected = self._question.answers[index]
        self._texts[index] += text
        self._tokens[index] += tuple(tokens)
        self._ends[index] = finish_reason
        if not expected.text.startswith(self._texts[index]):
            raise Wrong(f"choice {index} says {self._texts[index]!r}, not {expected.text!r}")
        if finish_reason is not None and (self._texts[index], self._tokens[index], finish_reason) != expected:
            found = (self._texts[index], self._tokens[index], finish_reason)
            raise Wrong(f"choice {index} is {found}, not {expected}")

    def ended(self) -> None:
        """The answer is over, and no error."""
        missing = [index for index, end in enumerate(self._ends) if end is None]
        if missing:
            raise Wrong(f"the answer is over, but choices {missing} have not ended: {self._texts}")


class Clients:
    """As many as `at_once`, each of which asks, and asks again, until it is told to stop. wrongs: what must not be.

    counts: answers by how they have ended: right, left, or an error's code. broken: connections that ended with a gateway.
    """

    def __init__(self, url: str, questions: Sequence[Question], seed: int, lived: Lived, at_once: int = 6) -> None:
        self._url = url
        self._questions = questions
        self._lived = lived
        self._rngs = [random.Random(f"{seed} {number}") for number in range(at_once)]
        self._stopping = False
        self.wrongs: list[str] = []
        self.counts: Counter[str] = Counter()
        self.ends = 0
        self.is_there = asyncio.Event()
        """Told by whoever ends gateways: how many so far, and whether there is one. Only connections to one that has ended may break."""
        self.is_there.set()

    async def run(self) -> None:
        """Until `stop`, and until all have been answered."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http,
            openai.AsyncOpenAI(base_url=self._url + "/v1", api_key="none", max_retries=0, timeout=None) as api,
        ):
            await asyncio.gather(*(self._ask_on(rng, http, api) for rng in self._rngs))

    def stop(self) -> None:
        self._stopping = True

    async def _ask_on(self, rng: random.Random, http: httpx.AsyncClient, api: openai.AsyncOpenAI) -> None:
        while not self._stopping:
            await self.is_there.wait()
            question, salt = rng.choice(self._questions), rng.choice(("", "", "a", "b"))
            # Draws come before the first wait, so that what is asked depends on the seed alone.
            leave = rng.randrange(20) if rng.random() < 0.15 else None
            stream, raw, pause = rng.random() < 0.7, rng.random() < 0.5, rng.expovariate(1 / 0.1)
            ends = self.ends
            body = {"model": "m", "stream": stream} | question.body(salt)
            asking = _ask_raw(http, body, question, leave) if raw else _ask_openai(api, body, question, leave)
            try:
                how = await self._lived.within(LONGEST, asking)
            except TimeoutError:
                self._wrong("hangs", question, salt, f"neither an answer nor an error within {LONGEST:.0f} s")
            except Wrong as wrong:
                self._wrong("wrong", question, salt, str(wrong))
            except (httpx.TransportError, openai.APIConnectionError) as error:
                if self.ends == ends:
                    # The system tells the end of a gateway that was killed at once, but not before who has killed it goes on.
                    await asyncio.sleep(0.2)
                if self.ends == ends:
                    self._wrong("broken", question, salt, f"the connection broke, but no gateway has ended: {error!r}")
                else:
                    self.counts["broken"] += 1
            else:
                self.counts[how] += 1
                if how not in HONEST | {"right", "left"}:
                    self._wrong("error", question, salt, how)
            await asyncio.sleep(pause)

    def _wrong(self, kind: str, question: Question, salt: str, what: str) -> None:
        self.counts[kind] += 1
        number = self._questions.index(question)
        self.wrongs.append(f"[{self._lived.now():.1f}] question {number} of {len(question.prompt)} tokens, salt {salt!r}: {what}")


async def _ask_raw(http: httpx.AsyncClient, body: dict[str, Any], question: Question, leave: int | None) -> str:
    heard = _Heard(question)
    if not body["stream"]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if leave is None else leave / 20):
                response = await http.post("/v1/completions", json=body)
                if response.status_code != 200:
                    return str(response.json()["error"]["code"])
                for choice in response.json()["choices"]:
                    heard.part(choice["index"], choice["text"], choice["token_ids"], choice["finish_reason"])
                heard.ended()
                return "right"
        return "left"
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return str(msgspec.json.decode(await response.aread())["error"]["code"])
        error: str | None = None
        done = False
        async for line in _lines(response):
            if done:
                raise Wrong(f"after [DONE] comes {line!r}")
            if line == "data: [DONE]":
                done = True
                continue
            event = msgspec.json.decode(line.removeprefix("data: "))
            if error is not None:
                raise Wrong(f"after the error {error} comes {event}")
            if "error" in event:
                error = str(event["error"]["code"])
                continue
            for choice in event["choices"]:
                heard.part(choice["index"], choice["text"], choice["token_ids"], choice["finish_reason"])
            if leave is not None:
                leave -= 1
                if leave < 0:
                    return "left"
        if not done:
            raise Wrong("the stream is over without [DONE]")
    if error is None:
        heard.ended()
    return error or "right"


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    async with contextlib.aclosing(response.aiter_lines()) as lines:
        async for line in lines:
            if line:
                yield line


async def _ask_openai(api: openai.AsyncOpenAI, body: dict[str, Any], question: Question, leave: int | None) -> str:
    heard = _Heard(question)
    known = {name: body[name] for name in ("model", "prompt", "n", "seed", "temperature", "max_tokens", "stream")}
    extra = {name: value for name, value in body.items() if name not in known}
    try:
        if not body["stream"]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if leave is None else leave / 20):
                    reply = await api.completions.create(**known, extra_body=extra)
                    for choice in reply.choices:
                        heard.part(choice.index, choice.text, choice.token_ids, choice.finish_reason)
                    heard.ended()
                    return "right"
            return "left"
        async with await api.completions.create(**known, extra_body=extra) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    heard.part(choice.index, choice.text, choice.token_ids, choice.finish_reason)
                if leave is not None:
                    leave -= 1
                    if leave < 0:
                        return "left"
        heard.ended()
    except openai.APIConnectionError:
        raise
    except openai.APIError as error:
        return str(error.code)
    return "right"
