"""The KV store as a worker sees it: blocks are fetched for those who wait, and those that were computed are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenmill.core.errors import ConfigError
from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.counts import Counts
from tokenmill.transfer.store.disk import DiskPolicy, DiskStore
from tokenmill.transfer.store.entry import HEAD_BYTES, Data, Label
from tokenmill.transfer.store.reader import Fetch, Reader, ReaderPolicy, Wanted
from tokenmill.transfer.store.remote import RemotePolicy, RemoteStore
from tokenmill.transfer.store.tiers import Store, Tiers
from tokenmill.transfer.store.writer import Writer, WriterPolicy


class StorePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what, for each part."""

    reader: ReaderPolicy = ReaderPolicy()
    writer: WriterPolicy = WriterPolicy()
    remote: RemotePolicy = RemotePolicy()
    disk: DiskPolicy = DiskPolicy()


class KVStore:
    """A worker's store, from `open` to `close`, for any thread.

    Nothing here blocks, but for `drain` and `close`, or raises for what the store does: what is not stored, comes too late or is damaged is
    computed.
    """

    def __init__(self, stores: Sequence[Store], counts: Counts, policy: StorePolicy) -> None:
        self._counts = counts
        self._tiers = Tiers(stores)
        self._writer = Writer(self._tiers.put, counts, policy.writer)
        self._reader = Reader(self._tiers, counts, forget=self._writer.forget, policy=policy.reader)

    @classmethod
    def open(cls, url: str | None, folder: Path | None, block_bytes: int, policy: StorePolicy | None = None) -> KVStore:
        """With a server, a folder of this host, or both, of which the folder is the nearer. block_bytes: of the longest payload.

        A server that is not there is no error: it may come. Raises `ConfigError` for a URL or folder that cannot be right.
        """
        policy = policy or StorePolicy()
        if url is None and folder is None:
            raise ConfigError("a KV store needs a server, a folder, or both", param="kv_store")
        counts = Counts()
        stores: list[Store] = []
        address = None if url is None else parse_address(url)
        if folder is not None:
            stores.append(DiskStore(folder, counts, policy.disk))
        if address is not None:
            stores.append(RemoteStore(address, HEAD_BYTES + block_bytes, counts, policy.remote))
        return cls(stores, counts, policy)

    def fetch(self, wanted: Wanted) -> Fetch:
        """Begin to bring blocks, of which `wanted` says what becomes of them."""
        return self._reader.fetch(wanted)

    def computed(self, tokens: int, seconds: float) -> None:
        """So many prompt tokens took so long: what fetching has to beat."""
        self._reader.computed(tokens, seconds)

    def wants(self, key: bytes, size: int) -> bool:
        """Whether `keep` would take a block with a payload of so many bytes, for who would have to gather it first."""
        return self._writer.wants(key, size)

    def keep(self, label: Label, payload: Data) -> bool:
        """Store a block behind the caller's back, who changes its payload no more; returns whether it is queued."""
        return self._writer.offer(label, payload)

    def drain(self, timeout: float) -> bool:
        """Wait, at most so many seconds, until all that was kept has been stored or given up; returns whether that is so."""
        return self._writer.flush(timeout)

    def counts(self) -> dict[str, int]:
        """What has happened so far (docs/kv-store.md)."""
        return self._counts.read()

    def close(self, timeout: float) -> None:
        """End all fetches, store for at most so many seconds what was kept, and end all threads."""
        self._reader.close()
        self._writer.close(timeout)
        self._tiers.close()
