"""The workers of all models behind one gateway: a cluster for each model, and one entrance for workers of other hosts.

Models share a host and a gateway and nothing else: each cluster has its own fleet, so that neither load nor faults nor speeds of one model
are mistaken for another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tokenmill.cluster.joining import Entrance, Listening
from tokenmill.cluster.local import Cluster, no_such_worker
from tokenmill.core.errors import TokenmillError
from tokenmill.core.joining import Join, JoinRefused
from tokenmill.worker.client import EngineClient


class Clusters:
    """From `open` to `stop`. Names of workers are apart over all of them."""

    def __init__(self, clusters: Sequence[Cluster], listening: Listening | None = None) -> None:
        """listening: where others join, which is closed with this; the clusters let them in then."""
        self._by_model = {cluster.model: cluster for cluster in clusters}
        assert len(self._by_model) == len(clusters) > 0, "each model has one cluster"
        self._entrance = None if listening is None else Entrance(listening, self._admit, self._welcome)

    def open(self) -> None:
        """Let workers of other hosts in. The clusters are started each for itself."""
        if self._entrance is not None:
            self._entrance.open()

    async def failed(self) -> TokenmillError:
        """Return, with the reason of one, when no worker of any model could be started again, and none can join."""
        return (await asyncio.gather(*(cluster.failed() for cluster in self._by_model.values())))[0]

    def migrate(self, name: str) -> int:
        """As `Cluster.migrate`."""
        return self._of(name).migrate(name)

    async def remove(self, name: str) -> None:
        """As `Cluster.remove`."""
        await self._of(name).remove(name)

    def begin_drain(self) -> None:
        """Take no new requests; those in flight go on."""
        for cluster in self._by_model.values():
            cluster.begin_drain()

    async def stop(self, timeout: float) -> None:
        """As `Cluster.stop`, of all at once."""
        self.begin_drain()
        if self._entrance is not None:
            await self._entrance.close()
        await asyncio.gather(*(cluster.stop(timeout) for cluster in self._by_model.values()))

    def kill(self) -> None:
        """End all processes now, from any context; for a second signal."""
        for cluster in self._by_model.values():
            cluster.kill()

    def _of(self, name: str) -> Cluster:
        for cluster in self._by_model.values():
            if name in cluster.names:
                return cluster
        raise no_such_worker(name, [known for cluster in self._by_model.values() for known in cluster.names])

    def _admit(self, join: Join) -> None:
        """Raises `JoinRefused`."""
        model = join.info.model
        cluster = self._by_model.get(model)
        if cluster is None:
            served, names = " and ".join(map(repr, self._by_model)), " or ".join(self._by_model)
            verb = "is" if len(self._by_model) == 1 else "are"
            raise JoinRefused(
                "model",
                f"it has model {model!r}, but {served} {verb} served here, and the gateway has no other vocabulary: start it with such a "
                f"model, or give its name here by --served-model-name {names}",
            )
        other = next((other for other in self._by_model.values() if other is not cluster and join.name in other.names), None)
        if other is not None:
            raise JoinRefused("name", f"a worker of model {other.model!r} is called {join.name}: give this one another --name")
        cluster.admit(join)

    def _welcome(self, join: Join, client: EngineClient) -> None:
        self._by_model[join.info.model].welcome(join, client)
