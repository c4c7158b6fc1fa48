"""Where models lie in the cache, and how a file gets there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tokenmill.core.errors import CatalogueError
from tokenmill.weights.progress import Progress, format_size

_CHUNK = 4 << 20


def default_home() -> Path:
    """`TOKENMILL_HOME`, else `XDG_CACHE_HOME/tokenmill`, else `~/.cache/tokenmill`."""
    if home := os.environ.get("TOKENMILL_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "tokenmill"


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Proof that the files were checked once: as long as size and modification time (ns) stay, they are not hashed again.

    target: what `resolve` returns, relative to the slot's folder (`.` is the folder). sha256: of the target, None
    where no digest is pinned.
    """

    name: str
    target: str
    sha256: str | None
    files: dict[str, tuple[int, int]]


class Slot:
    """The folder of one model below the cache's home, and the lock that makes its pullers take turns."""

    def __init__(self, home: Path, name: str) -> None:
        self.name = name
        self.folder = home / "models" / name.replace("/", "--").replace(":", "+")
        self._stamp = self.folder / "stamp.json"
        self._lock = self.folder.with_name(self.folder.name + ".lock")

    def ready(self, sha256: str | None) -> Path | None:
        """The checked file or folder, or None when it is absent, changed, or of another digest."""
        stamp = read_stamp(self.folder)
        if stamp is None or stamp.sha256 != sha256:
            return None
        for name, (size, mtime) in stamp.files.items():
            try:
                found = (self.folder / name).stat()
            except FileNotFoundError:
                return None
            if (found.st_size, found.st_mtime_ns) != (size, mtime):
                return None
        return self.folder / stamp.target

    def seal(self, target: str, sha256: str | None, names: list[str]) -> Path:
        """Record that the files `names` are complete and checked; returns the target's path."""
        files = {}
        for name in names:
            found = (self.folder / name).stat()
            files[name] = (found.st_size, found.st_mtime_ns)
        fresh = self._stamp.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(Stamp(self.name, target, sha256, files)))
        install(fresh, self._stamp)
        return self.folder / target

    @contextlib.contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the slot alone; calls `on_wait` once when another process has it. The lock dies with its process."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            self.folder.mkdir(exist_ok=True)
            yield

    def bytes_used(self) -> int:
        """Bytes of everything in the folder, unfinished downloads too."""
        return folder_bytes(self.folder)

    def remove(self) -> int:
        """Delete the folder; returns the bytes freed. Programs that have the files mapped keep them."""
        freed = self.bytes_used()
        shutil.rmtree(self.folder)
        return freed


def read_stamp(folder: Path) -> Stamp | None:
    """The stamp of a model folder; a damaged one counts as none."""
    try:
        return msgspec.json.decode((folder / "stamp.json").read_bytes(), type=Stamp)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`, which may be changing meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def install(source: Path, target: Path) -> None:
    """Give a finished file its name, atomically, and durably against a power cut."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def file_sha256(path: Path, label: str, progress: Progress) -> str:
    """SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        progress.begin(label, os.fstat(file.fileno()).st_size)
        try:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                progress.update(file.tell())
        finally:
            progress.end()
    return digest.hexdigest()


def check_space(folder: Path, needed: int) -> None:
    """Raise `CatalogueError` when the file system of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CatalogueError(
            f"{folder}: {format_size(free)} are free, but the download needs {format_size(needed)}: free some space, or set TOKENMILL_HOME",
            code="disk_full",
        )


@contextlib.contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses below `folder` into `CatalogueError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CatalogueError(
                f"{folder}: the disk is full: free some space, or set TOKENMILL_HOME; what has arrived is kept", code="disk_full"
            ) from None
        raise CatalogueError(f"{folder}: cannot store the model: {error}: set TOKENMILL_HOME to a folder that can be written") from None
