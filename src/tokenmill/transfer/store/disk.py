"""A store in a folder of this host: a file per entry, and no other state, so that it outlives its processes and serves several at once.

A file appears whole, by a rename, or not at all. What is read is checked, so that damage and things that others left in the folder are
misses. The folder is held to a size by deleting what was used longest ago: reading a file sets its time. How much is there is found by
looking at all files, not at each write but whenever this process has written a sixteenth of the limit; so where several processes write,
the folder may for a while exceed the limit by as much for each of them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.clock import MonotonicClock
from tokenmill.core.errors import ConfigError
from tokenmill.transfer.store.breaker import Backoff, Breaker
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.entry import Data, flaw

log = logging.getLogger(__name__)

_ENTRY = re.compile(r"[0-9a-f]{32}\.kv")
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.[0-9]+\.[0-9]+\.part")
_ABANDONED_AFTER = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """limit: bytes of all files."""

    limit: int = 16 << 30
    backoff: Backoff = Backoff()


class _File(NamedTuple):
    used: int
    """Nanoseconds of the wall clock."""
    size: int
    path: Path


class DiskStore:
    """A `Store` (tiers.py), for any thread. Raises `ConfigError` if the folder is not there and cannot be made."""

    def __init__(self, folder: Path, counts: Counts, policy: DiskPolicy | None = None) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {folder} for the KV store cannot be made: {error}", param="kv_store_folder") from None
        self._folder = folder
        self._counts = counts
        self._policy = policy or DiskPolicy()
        self._numbers = itertools.count()
        self._keeping = Breaker(MonotonicClock(), self._policy.backoff)
        self._room = threading.Lock()
        self._written = 0  # bytes, since all files were looked at
        self._make_room(0)

    def find(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if not self._path(key).is_file()), len(keys))

    def get(self, keys: Sequence[bytes], room: memoryview) -> list[memoryview]:
        entries: list[memoryview] = []
        for key in keys:
            entry = self._read(key, room)
            if entry is None:
                break
            entries.append(entry)
            room = room[len(entry) :]
        self._counts.add(Count.DISK_HITS, len(entries))
        return entries

    def put(self, entries: Sequence[tuple[bytes, Data]]) -> list[bool]:
        return [self._put(key, entry) for key, entry in entries]

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._remove(self._path(key))

    def close(self) -> None:
        """Nothing is held between two calls."""

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.kv"

    def _read(self, key: bytes, room: memoryview) -> memoryview | None:
        path = self._path(key)
        try:
            # Something else may have that name: a pipe, which would be waited for, or a link to anywhere.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            self._counts.add(Count.DISK_FAILURES)
            return None
        try:
            status = os.fstat(descriptor)
            if status.st_size > len(room):
                return None
            size = 0
            while size < status.st_size and (count := os.readv(descriptor, [room[size : status.st_size]])):
                size += count
            entry = room[:size]
            if flaw(key, entry) is not None:
                self._counts.add(Count.DISK_FLAWED)
                self._remove(path)
                return None
            with contextlib.suppress(OSError):  # a folder that may only be read
                os.utime(descriptor)
            return entry
        except OSError:
            self._counts.add(Count.DISK_FAILURES)
            return None
        finally:
            os.close(descriptor)

    def _put(self, key: bytes, entry: Data) -> bool:
        if len(entry) > self._policy.limit:
            self._counts.add(Count.DISK_OVERSIZED)
            return False
        path = self._path(key)
        if path.is_file():
            with contextlib.suppress(OSError):  # a folder that may only be read
                os.utime(path)
            return True
        if not self._keeping.admits():
            self._counts.add(Count.DISK_REFUSED)
            return False
        with self._room:
            self._written += len(entry)
            due = self._written > self._policy.limit // 16
        if due:
            self._make_room(len(entry))
        try:
            self._write(path, entry)
        except OSError as error:
            self._counts.add(Count.DISK_FAILURES)
            if self._keeping.failed() == 1:
                log.warning("the KV store's folder %s keeps nothing new: %s", self._folder, error)
            if error.errno in _FULL:
                self._make_room(0, full=True)
            return False
        self._keeping.succeeded()
        return True

    def _write(self, path: Path, entry: Data) -> None:
        part = path.parent / f"{path.stem}.{os.getpid()}.{next(self._numbers)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(part, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(part, flags, 0o600)
        try:
            try:
                view = memoryview(entry)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
            part.rename(path)
        except BaseException:
            self._remove(part)
            raise

    def _make_room(self, wanted: int, full: bool = False) -> None:
        """Delete what was used longest ago, until `wanted` bytes and a sixteenth of the limit can be written. full: the disk is, whatever
        the limit; then a quarter of what is here goes in any case."""
        if not self._room.acquire(blocking=False):
            return  # somebody is at it
        try:
            files = sorted(self._files())
            total = sum(file.size for file in files)
            excess = total - self._policy.limit + max(wanted, self._policy.limit // 16)
            if full:
                excess = max(excess, total // 4)
            for file in files:
                if excess <= 0:
                    break
                if self._remove(file.path):
                    self._counts.add(Count.DISK_EVICTED)
                    excess -= file.size
            self._written = wanted
        finally:
            self._room.release()

    def _files(self) -> Iterator[_File]:
        """All entries. Files that a process began and never finished are deleted on the way."""
        abandoned = time.time_ns() - int(_ABANDONED_AFTER * 1e9)
        for shard in _scan(self._folder):
            if len(shard.name) != 2 or not shard.is_dir(follow_symlinks=False):
                continue
            for item in _scan(shard.path):
                if not (_ENTRY.fullmatch(item.name) or _UNFINISHED.fullmatch(item.name)):
                    continue
                with contextlib.suppress(OSError):
                    status = item.stat(follow_symlinks=False)
                    if _ENTRY.fullmatch(item.name):
                        yield _File(status.st_mtime_ns, status.st_size, Path(item.path))
                    elif status.st_mtime_ns < abandoned:
                        self._remove(Path(item.path))

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except OSError:
            return False
        return True


def _scan(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except OSError:
        return []
