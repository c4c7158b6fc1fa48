"""What has happened between this process and the store, in numbers."""

from __future__ import annotations

import enum
import threading

from tokenmill.transfer.store.entry import Reason


class Count(enum.StrEnum):
    """docs/kv-store.md says what each means. Blocks, but for bytes, exchanges and openings."""

    FETCHES = "fetches"
    FETCHED = "fetched"
    FETCHED_BYTES = "fetched_bytes"
    FOUND = "found"
    NOT_WORTH = "not_worth"
    LATE = "late"
    CANCELLED = "cancelled"

    REJECTED_TRUNCATED = "rejected_truncated"
    REJECTED_CORRUPT = "rejected_corrupt"
    REJECTED_NO_ENTRY = "rejected_no_entry"
    REJECTED_VERSION = "rejected_version"
    REJECTED_FINGERPRINT = "rejected_fingerprint"
    REJECTED_TENANT = "rejected_tenant"
    REJECTED_KEY = "rejected_key"
    REJECTED_PARENT = "rejected_parent"
    REJECTED_SIZE = "rejected_size"

    OFFERED = "offered"
    KNOWN = "known"
    DROPPED = "dropped"
    WRITTEN = "written"
    WRITTEN_BYTES = "written_bytes"
    UNWRITTEN = "unwritten"

    REMOTE_HITS = "remote_hits"
    REMOTE_FAILURES = "remote_failures"
    REMOTE_OPENINGS = "remote_openings"
    REMOTE_SKIPPED = "remote_skipped"
    REMOTE_REFUSED = "remote_refused"

    DISK_HITS = "disk_hits"
    DISK_FLAWED = "disk_flawed"
    DISK_FAILURES = "disk_failures"
    DISK_REFUSED = "disk_refused"
    DISK_OVERSIZED = "disk_oversized"
    DISK_EVICTED = "disk_evicted"


def rejected(reason: Reason) -> Count:
    return Count(f"rejected_{reason}")


class Counts:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Count, int] = dict.fromkeys(Count, 0)

    def add(self, count: Count, by: int = 1) -> None:
        with self._lock:
            self._counts[count] += by

    def __getitem__(self, count: Count) -> int:
        return self._counts[count]

    def read(self) -> dict[str, int]:
        """All of them by name, as of one moment."""
        with self._lock:
            return {str(count): value for count, value in self._counts.items()}
