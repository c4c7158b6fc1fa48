"""Models in memory."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ModelNotFound
from tokenmill.kernels.native import Pool
from tokenmill.models.loader import Model, load


class Loaded(NamedTuple):
    """A model in memory, the threads that compute it, and its file's digest: what engines of different settings can share."""

    pool: Pool
    model: Model
    digest: Future[bytes]


def load_model(config: EngineConfig) -> Loaded:
    """Raises `ModelNotFound`, `ModelFileError` or `KernelError`."""
    path = Path(config.model)
    if not path.exists():
        raise ModelNotFound(f"there is no model file or folder {config.model!r}", param="model")
    return load_beside(path, Pool(config.threads, cpus=config.cpus))


def load_beside(path: Path, pool: Pool) -> Loaded:
    """A model that shares the threads of another one. Raises `ModelFileError`."""
    digest = _digest_beside(path)
    return Loaded(pool, load(path, pool), digest)


def model_digest(path: Path) -> bytes:
    """Of the model's file, or of the digests of its folder's files. Raises OSError."""
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json"))
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").digest())
    return b"".join(digests)


def _digest_beside(path: Path) -> Future[bytes]:
    """`model_digest` by a thread, which takes its seconds per gigabyte while the weights are packed; a load that fails does not
    wait for it."""
    found: Future[bytes] = Future()

    def work() -> None:
        try:
            found.set_result(model_digest(path))
        except OSError as error:
            found.set_exception(error)

    threading.Thread(target=work, name="model digest", daemon=True).start()
    return found
