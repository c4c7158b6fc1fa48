"""What the routes share: the models that are served, and who may come in."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from tokenmill.cluster.clusters import Clusters
from tokenmill.cluster.joining import Listening
from tokenmill.cluster.supervisor import State
from tokenmill.core.errors import AuthenticationError, InvalidRequest, ModelNotFound, TokenmillError, Unavailable
from tokenmill.gateway.replies import WorkerCard
from tokenmill.gateway.served_model import ServedModel
from tokenmill.observe.metrics import render

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2048
"""Requests that are worked on or wait, over all clients; more are refused, as each holds memory."""

STATS_WITHIN = 1.0
"""Seconds that a scrape waits for the engines; past them it shows the counters last heard."""


class Service:
    """One or several models. `load` makes them ready; `clusters.stop` and `close` end them."""

    def __init__(self, models: Sequence[ServedModel], api_key: str | None = None, listening: Listening | None = None) -> None:
        """listening: where workers of other hosts join; their models' clusters let them in then."""
        self.models = tuple(models)
        self.clusters = Clusters([model.cluster for model in models], listening)
        self.created = int(time.time())
        self._by_name = {name: model for model in models for name in model.names}
        self._api_key = api_key.encode() if api_key is not None else None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def load(self, announce: Callable[[ServedModel], None]) -> None:
        """Load all models side by side; `announce` is called for each that is ready. Raises the error of the first that cannot be."""
        self.clusters.open()

        async def load(model: ServedModel) -> None:
            try:
                await model.load()
            except TokenmillError:
                if len(self.models) > 1:  # what is said of it need not name the model
                    log.error("model %s cannot be loaded", model.names[0])
                raise
            announce(model)

        loading = [asyncio.create_task(load(model)) for model in self.models]
        try:
            await asyncio.gather(*loading)
        finally:
            for task in loading:
                task.cancel()
            await asyncio.gather(*loading, return_exceptions=True)

    @property
    def names(self) -> list[str]:
        """By which models may be called."""
        return list(self._by_name)

    def model(self, name: str) -> ServedModel:
        """Raises `ModelNotFound` for a name that is not served here."""
        model = self._by_name.get(name)
        if model is None:
            served = ", ".join(map(repr, self._by_name))
            raise ModelNotFound(f"model {name!r} is not served here, but {served} is", param="model")
        return model

    def model_or_only(self, name: str | None) -> ServedModel:
        """As `model`. None is the only one; raises `InvalidRequest` if there are several."""
        if name is not None:
            return self.model(name)
        if len(self.models) > 1:
            raise InvalidRequest(f"model is missing: several are served here, {', '.join(map(repr, self._by_name))}", param="model")
        return self.models[0]

    @property
    def status(self) -> str:
        """One word for probes: ok if a model is, else what is with the first."""
        found = [model.status for model in self.models]
        return "ok" if "ok" in found else found[0]

    def check_key(self, authorization: str | None) -> None:
        """Raise `AuthenticationError` unless the header carries the key, if there is one."""
        if self._api_key is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._api_key):
            what = "wrong" if authorization else "missing"
            raise AuthenticationError(f"the API key is {what}: send it as 'Authorization: Bearer KEY'")

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in flight while it is worked on. Raises `Unavailable` when draining or saturated."""
        if self.models[0].cluster.state is State.DRAINING:  # as all are then
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

    async def render_metrics(self) -> bytes:
        """The exposition text, with the engines' counters as fresh as they can give them."""
        found = await asyncio.gather(*(model.cluster.stats(STATS_WITHIN) for model in self.models))
        engines = zip(self.models, found, strict=True)
        return render(family for model, stats in engines for family in model.metrics.families(stats, model.cluster.advancing))

    async def workers(self) -> list[WorkerCard]:
        """All that there are to be, with what is known of them."""
        await asyncio.gather(*(model.cluster.stats(STATS_WITHIN) for model in self.models))
        cards = []
        for model in self.models:
            for name, role, state, member in model.cluster.overview():
                card = WorkerCard(name=name, model=model.names[0], role=role.value, state=state)
                if member is not None:
                    card.pid, card.threads, card.kv_tokens = member.info.pid, member.info.threads, member.info.kv_tokens
                    if member.stats is not None:
                        card.running, card.waiting = member.stats.running, member.stats.waiting
                cards.append(card)
        return cards

    def close(self) -> None:
        for model in self.models:
            model.close()
