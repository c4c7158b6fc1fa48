"""What was found out about a model by running it: the range of its keys, and which heads look far back. A file beside the model.

The file is in the safetensors format under a name of its own: other programs take every *.safetensors of a folder for weights, and the
model's digest covers them.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

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

VERSION = "1"
"""Changes whenever a file of the same model would differ."""

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
    """Where the calibration of a model file or folder is."""
    return model / "tokenmill.calibration" if model.is_dir() else model.with_name(model.name.removesuffix(".gguf") + ".calibration")


def write_calibration(path: Path, calibration: Calibration, model_digest: bytes) -> None:
    """Write in one atomic step. Raises OSError, and leaves no half of a file."""
    tensors = {FACTOR: calibration.keys.factor, ZERO: calibration.keys.zero, RETRIEVAL: calibration.retrieval}
    said = {"version": VERSION, "model": model_digest.hex(), "digest": calibration.digest}
    descriptor, name = tempfile.mkstemp(suffix=".new", prefix=f"{path.name}.", dir=path.parent)
    fresh = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(safetensors_bytes(tensors, said))
        fresh.chmod(0o644)
        install(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def read_calibration(path: Path, model_digest: bytes, shape: tuple[int, int, int]) -> Calibration:
    """Read and check a file. shape: (layers, kv heads, head_dim).

    Raises `CalibrationError` if it is not that of this model in this version, whole.
    """
    try:
        tensors, said = read_safetensors(path)
    except ModelFileError as error:
        raise CalibrationError(f"{path} is damaged: {_REMEDY} ({error})") from None
    if said.get("version") != VERSION:
        raise CalibrationError(f"{path} is of version {said.get('version')!r}, but this program reads version {VERSION}: {_REMEDY}")
    if said.get("model") != model_digest.hex():
        raise CalibrationError(f"{path} belongs to another model than the one beside it, or to another state of it: {_REMEDY}")
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
