"""What was found out about a model by running it: the range of its keys, and which heads look far back. A file beside the model.

The file is in the safetensors format under a name of its own: other programs take every *.safetensors of a folder for weights, and the
model's digest covers them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import CalibrationError, ModelFileError
from tokenmill.core.types import Pair, Streaming
from tokenmill.kernels.layout import KeyCalibration
from tokenmill.weights.safetensors import read_safetensors, safetensors_bytes
from tokenmill.weights.store import install
from tokenmill.weights.tensor import RawTensor

F32 = npt.NDArray[np.float32]

STREAMING = Streaming(sinks=64, recent=256)
"""What heads that do not retrieve are left with once a sequence is sparse (docs/calibration.md)."""

VERSION = 1
"""Goes up whenever a file of the same model would differ."""

FACTOR, ZERO, RETRIEVAL = "keys.factor", "keys.zero", "retrieval"


@dataclass(frozen=True)
class Calibration:
    """keys: for the formats with integer keys. retrieval: float32 [layers, kv_heads], from 0 to 1: the share of its attention that a
    head gives to a far position because of what stands there."""

    keys: KeyCalibration
    retrieval: F32

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        digest = hashlib.sha256(f"{VERSION} {self.keys.factor.shape}".encode())
        for tensor in (self.keys.factor, self.keys.zero, self.retrieval):
            digest.update(tensor.astype("<f4").tobytes())
        return digest.hexdigest()

    def ranked(self) -> list[Pair]:
        """All pairs, those that retrieve first; of equal ones the lower layer and head."""
        order = np.argsort(-self.retrieval, axis=None, kind="stable")
        layers, heads = np.unravel_index(order, self.retrieval.shape)
        return list(zip(layers.tolist(), heads.tolist(), strict=True))

    def divide(self, pairs: Collection[Pair], keep_ratio: float) -> tuple[list[Pair], list[Pair]]:
        """Those of `pairs` that stay whole, `keep_ratio` of them rounded up, and those that can do with what `STREAMING` says; in both the
        ones that retrieve more come first."""
        ranked = [pair for pair in self.ranked() if pair in pairs]
        kept = math.ceil(keep_ratio * len(ranked) - 1e-9)
        return ranked[:kept], ranked[kept:]


def calibration_path(model: Path) -> Path:
    """Where the calibration of a model file or folder is: beside the name that is given, so that a link has one of its own."""
    return model / "tokenmill.calibration" if model.is_dir() else model.with_name(model.name.removesuffix(".gguf") + ".calibration")


def write_calibration(path: Path, calibration: Calibration, model_digest: bytes) -> None:
    """Write in one atomic step. Raises OSError, and leaves no half of a file."""
    tensors = {FACTOR: calibration.keys.factor, ZERO: calibration.keys.zero, RETRIEVAL: calibration.retrieval}
    said = {"version": str(VERSION), "model": model_digest.hex(), "digest": calibration.digest}
    fresh = _fresh(path)
    with _alone(fresh) as file:
        try:
            file.truncate(0)
            file.write(safetensors_bytes(tensors, said))
            file.flush()
            install(fresh, path)
        except BaseException:
            if _is_called(file, fresh):
                fresh.unlink()
            raise


def check_place(path: Path) -> None:
    """Raise OSError unless a calibration can be written there."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    fresh = _fresh(path)
    with _alone(fresh):
        fresh.unlink()


def _fresh(path: Path) -> Path:
    """What is written before it gets its name: one file, so that there is never more to leave behind, and the next writer uses it up."""
    return path.with_name(f"{path.name}.new")


@contextlib.contextmanager
def _alone(fresh: Path) -> Iterator[BinaryIO]:
    """The file of that name, which nobody else has until it is closed or has another name."""
    while True:
        with fresh.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_called(file, fresh):
                yield file
                return


def _is_called(file: BinaryIO, name: Path) -> bool:
    """Whether it is that file which has the name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), name.stat())
    except FileNotFoundError:
        return False


def read_calibration(path: Path, model_digest: bytes, shape: tuple[int, int, int]) -> Calibration | None:
    """Read and check a file, which is None if it is of an older version. shape: (layers, kv heads, head_dim).

    Raises `CalibrationError` if it is not that of this model, whole, or is of a newer version.
    """
    try:
        tensors, said = read_safetensors(path, _REMEDY)
    except ModelFileError as error:
        raise CalibrationError(error.message) from None
    version = said.get("version", "")
    if not version.isdecimal() or int(version) > VERSION:
        raise CalibrationError(f"{path}: version is {version!r}, but this program reads versions up to {VERSION}: {_REMEDY}")
    if said.get("model") != model_digest.hex():
        raise CalibrationError(f"{path} belongs to another model than the one beside it, or to another state of it: {_REMEDY}")
    if int(version) < VERSION:
        return None
    found = Calibration(
        KeyCalibration(_numbers(path, tensors, FACTOR, shape), _numbers(path, tensors, ZERO, shape)),
        _numbers(path, tensors, RETRIEVAL, shape[:2]),
    )
    if said.get("digest") != found.digest:
        raise CalibrationError(f"{path} is damaged, its content has not the digest that it names: {_REMEDY}")
    if not (np.isfinite(found.keys.factor) & (found.keys.factor > 0) & np.isfinite(found.keys.zero)).all():
        raise CalibrationError(f"{path} has a factor of keys that is not above 0, or no number: {_REMEDY}")
    return found


_REMEDY = "run `tokenmill calibrate MODEL`, which replaces it, or remove the file"


def _numbers(path: Path, tensors: dict[str, RawTensor], name: str, shape: tuple[int, ...]) -> F32:
    tensor = tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.data.size != 4 * int(np.prod(shape)):
        raise CalibrationError(f"{path} has no {name} of shape {shape}, as this model needs: {_REMEDY}")
    return tensor.data.view("<f4").reshape(shape).astype(np.float32)
