"""One model as clients see it: its names, its vocabulary, and the workers that answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenmill.cluster.local import Cluster
from tokenmill.cluster.supervisor import State
from tokenmill.core.errors import InvalidRequest, Unavailable
from tokenmill.core.limits import room_after
from tokenmill.core.types import SamplingParams
from tokenmill.gateway.completion import Completion
from tokenmill.gateway.prompts import PromptBuilder
from tokenmill.gateway.sampling import check_stream_options, priority
from tokenmill.gateway.schemas import GenerationRequest
from tokenmill.observe.metrics import Metrics

if TYPE_CHECKING:
    from tokenmill.text.templates import ChosenTemplate
    from tokenmill.text.tokenizer import Tokenizer

MAX_TOTAL_CHOICES = 2048
"""Prompts of one request times `n`: all of them wait and answer together, so each more keeps all others waiting."""


class ServedModel:
    """`load` makes it ready; `cluster.stop` and `close` end it."""

    def __init__(
        self,
        cluster: Cluster,
        load_tokenizer: Callable[[], Tokenizer],
        names: Sequence[str],
        chosen: ChosenTemplate | None = None,
    ) -> None:
        """`names`: what clients may call the model, the first one is what answers call it. `chosen`: a chat template instead of its own."""
        self.cluster = cluster
        self.names = tuple(names)
        self.metrics = Metrics(self.names[0], cluster.metrics)
        self._load_tokenizer = load_tokenizer
        self._chosen = chosen
        self._prompts: PromptBuilder | None = None

    async def load(self) -> None:
        """Load the engine and the vocabulary side by side. Raises the error of either."""
        engine = asyncio.create_task(self.cluster.start())
        try:
            tokenizer = await asyncio.to_thread(self._load_text)
            info = await engine
        finally:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        self._prompts = PromptBuilder(tokenizer, info.vocab_size, self._chosen)

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
    def has_been_ready(self) -> bool:
        return self._prompts is not None

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

    def close(self) -> None:
        if self._prompts is not None:
            self._prompts.close()
