"""Kernel variants, the thread pool and packed weights: the native library behind types.

Importing this module loads the native library; nothing above `engine` does so before an engine is built.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from tokenmill import _native
from tokenmill.core.cpus import parse_cpus, require_usable, usable_cpus
from tokenmill.core.errors import KernelError

VARIANT_VARIABLE = "TOKENMILL_KERNELS"
"""Environment variable that forces a kernel variant."""


def variants() -> list[str]:
    """Kernel variants that this CPU can run, fastest first."""
    return list(_native.variants())


def default_variant() -> str:
    """The variant named by TOKENMILL_KERNELS, or the fastest one. Raises `KernelError` if the named one cannot run."""
    usable = variants()
    wanted = os.environ.get(VARIANT_VARIABLE)
    if not wanted:
        return usable[0]
    if wanted not in usable:
        raise KernelError(f"{VARIANT_VARIABLE} is {wanted!r}, but this CPU can run only: {', '.join(usable)}", param=VARIANT_VARIABLE)
    return wanted


class Pool:
    """The threads and the kernel variant of one engine. The calling thread counts as one of them."""

    def __init__(self, threads: int = 0, variant: str | None = None, cpus: str | None = None) -> None:
        """threads: 0 takes one per listed CPU, or without a list one per CPU of this process. cpus: `0-3,8` keeps each thread on
        one of them in that order, the caller (which comes first) only while it computes. Raises `KernelError`, `ConfigError`."""
        self.variant = variant or default_variant()
        if self.variant not in variants():
            raise KernelError(f"no kernel variant {self.variant!r} on this CPU; there are: {', '.join(variants())}")
        listed = parse_cpus(cpus, threads)
        require_usable(listed)
        self.cpus = cpus
        try:
            self.native = _native.Pool(threads or len(listed or usable_cpus()), listed)
        except RuntimeError as error:
            raise KernelError(f"{error}: ask for fewer threads", param="threads") from None

    @property
    def threads(self) -> int:
        return self.native.threads

    def give_way(self) -> None:
        """Have each thread yield its CPU once, when it has no work in its hands. Returns at once."""
        self.native.give_way()


class PackedWeight:
    """A weight matrix [rows, cols] in the form its kernels read (native/include/weight_format.h)."""

    def __init__(self, native: _native.Weight) -> None:
        self.native = native

    @classmethod
    def pack(cls, kind: str, rows: int, cols: int, data: npt.NDArray[np.uint8], pool: Pool) -> PackedWeight:
        """Pack the file's bytes (uint8 [n], row after row) of a GGUF type. Raises ValueError if they do not fit the shape."""
        return cls(_native.pack(kind, rows, cols, data, pool.native))

    def narrow(self, pool: Pool) -> PackedWeight:
        """In 4 bits (Q4_0), at a loss. Raises ValueError if its columns are not in blocks of 32."""
        return PackedWeight(_native.narrow(self.native, pool.native))

    @property
    def rows(self) -> int:
        return self.native.rows

    @property
    def cols(self) -> int:
        return self.native.cols

    @property
    def form(self) -> str:
        """The GGUF type it was packed from."""
        return self.native.type

    @property
    def nbytes(self) -> int:
        return self.native.nbytes

    def dequantize(self, rows: npt.NDArray[np.int32] | None = None) -> npt.NDArray[np.float32]:
        """The rows asked for, or all: float32 [n, cols]."""
        wanted = np.arange(self.rows, dtype=np.int32) if rows is None else rows
        out = np.empty((len(wanted), self.cols), np.float32)
        self.native.dequantize_rows(wanted, out)
        return out
