"""A file of untrusted bytes, mapped read-only, and the form of the errors about its fields."""

from __future__ import annotations

import mmap
import reprlib
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ModelFileError


class MappedFile:
    """The bytes of one file as they were long at opening. Raises `ModelFileError` when it cannot be mapped. remedy: what errors tell
    to do; None tells what helps a model's file.

    The mapping lives as long as the last view of it; a file that is truncated in place while mapped kills the
    process (SIGBUS), which is why the catalogue only ever replaces files by rename.
    """

    def __init__(self, path: Path, remedy: str | None = None) -> None:
        self.path = path
        self._remedy = remedy
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise self.error("not a regular file", "give the path of a model file")
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self.bytes: mmap.mmap | bytes = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else b""
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ModelFileError(f"{path}: cannot be read: {why}") from None
        self._view = np.frombuffer(self.bytes, np.uint8)

    def view(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """Read-only uint8[end - start] over the file's own pages."""
        assert 0 <= start <= end <= self.size, f"[{start}, {end}) is outside of {self.path} ({self.size} bytes)"
        return self._view[start:end]

    def error(self, what: str, remedy: str) -> ModelFileError:
        """remedy: for a model's file."""
        return ModelFileError(f"{self.path}: {what}: {self._remedy or remedy}")

    def fault(self, field: str, value: object, wanted: str) -> ModelFileError:
        """The error for a field whose value cannot be: names the file, the field, the value and the limit."""
        what = f"{field} is {reprlib.repr(value)}, but must be {wanted}"
        return self.error(what, "the file is damaged or truncated, fetch it again")

    def check_disjoint(self, spans: Iterable[tuple[int, int, str]]) -> None:
        """Raise `ModelFileError` when two of the (start, end, tensor name) spans share a byte."""
        last_end, last_name = 0, ""
        for start, end, name in sorted(spans):
            if start < last_end:
                raise self.fault(f"offset of tensor {name!r}", start, f"at least {last_end}, the end of tensor {last_name!r}")
            last_end, last_name = end, name
