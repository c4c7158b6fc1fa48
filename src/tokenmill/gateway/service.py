"""What the routes share: the engine, the vocabulary, the names of the model, and who may come in."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tokenmill.cluster.local import Cluster
from tokenmill.cluster.supervisor import State
from tokenmill.core.errors import AuthenticationError, InvalidRequest, ModelNotFound, Unavailable
from tokenmill.core.limits import room_after
from tokenmill.core.messages import EngineInfo
from tokenmill.core.types import SamplingParams
from tokenmill.gateway.completion import Completion
from tokenmill.gateway.prompts import PromptBuilder
from tokenmill.gateway.replies import WorkerCard
from tokenmill.gateway.sampling import check_stream_options, priority
from tokenmill.gateway.schemas import GenerationRequest
from tokenmill.observe.metrics import Metrics

if TYPE_CHECKING:
    from tokenmill.text.templates import ChosenTemplate
    from tokenmill.text.tokenizer import Tokenizer

MAX_IN_FLIGHT = 2048
"""Requests that are worked on or wait, over all clients; more are refused, as each holds memory."""

MAX_TOTAL_CHOICES = 2048
"""Prompts of one request times `n`: all of them wait and answer together, so each more keeps all others waiting."""

STATS_WITHIN = 1.0
"""Seconds that a scrape waits for the engine; past them it shows the counters last heard."""


class Service:
    """One served model. `load` makes it ready; `cluster.stop` and `close` end it."""

    def __init__(
        self,
        cluster: Cluster,
        load_tokenizer: Callable[[], Tokenizer],
        names: Sequence[str],
        api_key: str | None = None,
        chosen: ChosenTemplate | None = None,
    ) -> None:
        """`names`: what clients may call the model, the first one is what answers call it. `chosen`: a chat template instead of its own."""
        self.cluster = cluster
        self.names = tuple(names)
        self.metrics = Metrics(self.names[0], cluster.metrics)
        self.created = int(time.time())
        self._load_tokenizer = load_tokenizer
        self._chosen = chosen
        self._api_key = api_key.encode() if api_key is not None else None
        self._prompts: PromptBuilder | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def load(self) -> EngineInfo:
        """Load the engine and the vocabulary side by side. Raises the error of either."""
        engine = asyncio.create_task(self.cluster.start())
        try:
            tokenizer = await asyncio.to_thread(self._load_text)
            info = await engine
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        self._prompts = PromptBuilder(tokenizer, info.vocab_size, self._chosen)
        return info

    def _load_text(self) -> Tokenizer:
        """The vocabulary; what chats need beside it is imported here too, so that it is not waited for when the engine is ready."""
        import tokenmill.text.chat  # noqa: F401

        return self._load_tokenizer()

    @property
    def prompts(self) -> PromptBuilder:
        """Raises `Unavailable` until the model is loaded."""
        if self._prompts is None:
            raise Unavailable("the model is loading: try again shortly")
        return self._prompts

    @property
    def max_model_len(self) -> int:
        """Of the engine that runs now: it may depend on the memory that was free when it started."""
        return self.cluster.info.max_model_len

    @property
    def status(self) -> str:
        """One word for probes: ok, loading, down, draining or stalled."""
        state = self.cluster.state
        if state is not State.READY:
            return state.value
        if self._prompts is None:
            return State.LOADING.value
        return "ok" if self.cluster.advancing else "stalled"

    @property
    def system_fingerprint(self) -> str:
        """Changes whenever the answers to the same seed may change."""
        return "tm_" + self.cluster.info.fingerprint[:16]

    def check_key(self, authorization: str | None) -> None:
        """Raise `AuthenticationError` unless the header carries the key, if there is one."""
        if self._api_key is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._api_key):
            what = "wrong" if authorization else "missing"
            raise AuthenticationError(f"the API key is {what}: send it as 'Authorization: Bearer KEY'")

    def check_model(self, name: str) -> None:
        """Raise `ModelNotFound` for a name that is not served here."""
        if name not in self.names:
            raise ModelNotFound(f"model {name!r} is not served here, but {', '.join(map(repr, self.names))} is", param="model")

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in flight while it is worked on. Raises `Unavailable` when draining or saturated."""
        if self.cluster.state is State.DRAINING:
            raise Unavailable("the server is shutting down and takes no new requests: use another one, or wait for its restart")
        if self._in_flight >= MAX_IN_FLIGHT:
            raise Unavailable(f"{self._in_flight} requests are in flight, which is the limit: try again shortly")
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    def complete(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        prompt_param: str,
        session: str | None,
        arrived: float,
    ) -> Completion:
        """A completion of `prompts`, with the seed and max_tokens of each resolved. Raises `InvalidRequest`."""
        check_stream_options(request)
        if len(prompts) * params.n > MAX_TOTAL_CHOICES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n {params.n} are {len(prompts) * params.n} choices, but {MAX_TOTAL_CHOICES} are the limit: "
                "split the request",
                param="n",
            )
        rooms = [room_after(len(prompt), self.max_model_len, params.max_tokens, prompt_param) for prompt in prompts]
        return Completion(
            self.prompts.tokenizer,
            self.metrics,
            prompts,
            [params.resolved(room) for room in rooms],
            engine=self.cluster.info,
            priority=priority(request),
            cache_salt=request.cache_salt or "",
            session=session,
            arrived=arrived,
        )

    async def render_metrics(self) -> bytes:
        """The exposition text, with the engines' counters as fresh as they can give them."""
        return self.metrics.render(await self.cluster.stats(STATS_WITHIN), self.cluster.advancing)

    async def workers(self) -> list[WorkerCard]:
        """All that there are to be, with what is known of them."""
        await self.cluster.stats(STATS_WITHIN)
        cards = []
        for name, role, state, member in self.cluster.overview():
            card = WorkerCard(name=name, role=role.value, state=state)
            if member is not None:
                card.pid, card.threads, card.kv_tokens = member.info.pid, member.info.threads, member.info.kv_tokens
                if member.stats is not None:
                    card.running, card.waiting = member.stats.running, member.stats.waiting
            cards.append(card)
        return cards

    def close(self) -> None:
        if self._prompts is not None:
            self._prompts.close()
