"""Definitions on disk, so that a warm start reads no vocabulary and derives no merges."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from tokenmill.text.definition import Definition

_VERSION = b"tokenmill tokenizer 1\n"
"""Changes whenever a definition built from the same file would differ."""

_DIGEST_BYTES = 32


class DefinitionCache:
    """One file per model file: the SHA-256 of the rest, then a msgpack `Definition`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def key(files: list[Path]) -> str:
        """Names a definition by its files' paths, sizes and times of change, without reading them."""
        digest = hashlib.sha256(_VERSION)
        for file in files:
            status = file.stat()
            digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def load(self, key: str) -> Definition | None:
        """The stored definition; None when there is none or the file is damaged."""
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return None
        payload = data[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != data[:_DIGEST_BYTES]:
            return None
        try:
            return msgspec.msgpack.decode(payload, type=Definition)
        except msgspec.DecodeError:  # whole, but written by a version with other fields
            return None

    def store(self, key: str, definition: Definition) -> None:
        """Write in one atomic step; a folder that cannot be written to is left as it is, and the next start is cold."""
        payload = msgspec.msgpack.encode(definition)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=f"{key[:16]}-", suffix=".part")
        except OSError:
            return
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            Path(temporary).replace(self._path(key))
        except OSError:
            Path(temporary).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.tokenizer"
