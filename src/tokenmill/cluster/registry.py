"""Which workers there are: who has joined, what each can take, and who is to get nothing new."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tokenmill.core.errors import ConfigError
from tokenmill.core.messages import EngineInfo
from tokenmill.core.roles import Role


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it presents itself when it joins.

    id: its name for as long as the cluster lives; a process that is started again joins under the same one. boot: random, of this
    process alone. address: where its connector is. max_model_len: tokens of prompt plus output that it takes at most.
    max_batch_size: sequences in one step. kv_tokens: positions in its KV pool. chunk_size: prompt tokens in one step at most.
    """

    id: str
    role: Role
    model: str
    fingerprint: str
    boot: str
    address: str
    max_model_len: int
    max_batch_size: int
    kv_tokens: int
    chunk_size: int = 512

    @classmethod
    def of(cls, name: str, role: Role, info: EngineInfo) -> Worker:
        """Raises `ConfigError` for what cannot be."""
        return cls(
            id=name,
            role=role,
            model=info.model,
            fingerprint=info.fingerprint,
            boot=info.boot,
            address=info.address,
            max_model_len=info.max_model_len,
            max_batch_size=info.max_batch_size,
            kv_tokens=info.kv_tokens,
            chunk_size=info.chunk_size,
        )

    def __post_init__(self) -> None:
        for name in ("id", "model", "boot"):
            if not getattr(self, name):
                raise ConfigError(f"a worker joins without {name}: it must tell one", param=name)
        for name in ("max_model_len", "max_batch_size", "kv_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"worker {self.id}: {name} is {getattr(self, name)}, but must be at least 1", param=name)


class Registry:
    """The workers of all models behind one gateway, in the order in which they joined. Reading is O(1), changing O(workers)."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._draining: set[str] = set()
        self._takers: dict[tuple[str, Role], tuple[Worker, ...]] = {}

    def join(self, worker: Worker) -> Worker | None:
        """Add a worker. Returns the one that it takes the place of: an earlier process of the same id, whose drain ends with it, or
        the same process, which has connected again and goes on draining if it did."""
        before = self._workers.get(worker.id)
        self._workers[worker.id] = worker
        if before is not None and before.boot != worker.boot:
            self._draining.discard(worker.id)
        self._takers.clear()
        return before

    def leave(self, worker_id: str, boot: str) -> Worker | None:
        """Remove a worker and return it. News of the end of a process that another has already replaced changes nothing."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.boot != boot:
            return None
        del self._workers[worker_id]
        self._draining.discard(worker_id)
        self._takers.clear()
        return worker

    def drain(self, worker_id: str) -> bool:
        """Have a worker get nothing new, for good; what it has goes on. False: there is no such worker."""
        if worker_id not in self._workers:
            return False
        self._draining.add(worker_id)
        self._takers.clear()
        return True

    def is_draining(self, worker_id: str) -> bool:
        return worker_id in self._draining

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def models(self) -> list[str]:
        """Names of the models that any worker has."""
        return list(dict.fromkeys(worker.model for worker in self._workers.values()))

    def of_role(self, model: str, wanted: Role) -> list[Worker]:
        """Workers of a model whose role takes such work, draining ones too."""
        return [worker for worker in self._workers.values() if worker.model == model and worker.role.takes(wanted)]

    def takers(self, model: str, wanted: Role) -> tuple[Worker, ...]:
        """Those of them that may get something new."""
        known = self._takers.get((model, wanted))
        if known is None:
            known = tuple(worker for worker in self.of_role(model, wanted) if worker.id not in self._draining)
            # A model that nobody serves is any text that a caller has sent: it is not remembered.
            if known:
                self._takers[model, wanted] = known
        return known

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())
