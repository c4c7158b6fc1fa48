"""Workers as they present themselves."""

from __future__ import annotations

import msgspec

from tokenmill.cluster.registry import Worker
from tokenmill.core.roles import Role

PLAIN = Worker(
    id="w0",
    role=Role.MIXED,
    model="m",
    fingerprint="f",
    boot="first",
    address="unix:",
    max_model_len=100_000,
    max_batch_size=256,
    kv_tokens=1_000_000,
)


def worker(worker_id: str = "w0", role: Role = Role.MIXED, **changes: object) -> Worker:
    return msgspec.structs.replace(PLAIN, id=worker_id, role=role, **changes)
