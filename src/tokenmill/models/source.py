"""An open model file or folder, whichever it is, as architectures see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ModelFileError
from tokenmill.models.names import GGUF, HF, HF_GEMMA, Names
from tokenmill.weights.gguf import GGUFFile
from tokenmill.weights.safetensors import SafetensorsFolder
from tokenmill.weights.tensor import RawTensor

ROPE_FACTORS = "rope_freqs.weight"


class Source:
    """values: GGUF metadata or config.json. Tensors are asked for by the names programs use (models/names.py)."""

    def __init__(self, path: Path, architecture: str, values: Mapping[str, Any], tensors: Mapping[str, RawTensor], names: Names) -> None:
        self.path = path
        self.architecture = architecture
        self.values = values
        self.tensors = tensors
        self.names = names

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Open a .gguf file or a folder with config.json and safetensors. Raises `ModelFileError`."""
        path = Path(path)
        if path.is_dir():
            folder = SafetensorsFolder.open(path)
            kind = str(folder.config.get("model_type", ""))
            return cls(path, kind, folder.config, folder.tensors, HF_GEMMA if kind.startswith("gemma3") else HF)
        file = GGUFFile.open(path)
        return cls(path, file.metadata.expect("general.architecture", str), file.metadata, file.tensors, GGUF)

    @property
    def is_gguf(self) -> bool:
        return self.names is GGUF

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.tensor("embed").rows

    def has(self, name: str) -> bool:
        return self.names.of(name) in self.tensors

    def tensor(self, name: str) -> RawTensor:
        """The tensor, or `ModelFileError` naming what is missing."""
        wanted = self.names.of(name)
        if wanted not in self.tensors:
            raise ModelFileError(f"{self.path}: tensor {wanted!r} is missing, which a {self.architecture} model needs", param=wanted)
        return self.tensors[wanted]

    def rope_factors(self) -> npt.NDArray[np.float64] | None:
        """The numbers by which rotary frequencies are divided, float64 [head_dim / 2], if the file has any."""
        if ROPE_FACTORS not in self.tensors:
            return None
        return as_float32(self.tensors[ROPE_FACTORS]).astype(np.float64)


def as_float32(tensor: RawTensor) -> npt.NDArray[np.float32]:
    """A dense tensor's numbers, float32 [rows * cols]. Raises `ModelFileError` for a quantised one."""
    data = np.ascontiguousarray(tensor.data)
    match tensor.type:
        case "F32":
            return data.view(np.float32).copy()
        case "F16":
            return data.view(np.float16).astype(np.float32)
        case "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise ModelFileError(f"{tensor.name}: a vector of type {tensor.type} is not supported; F32, F16 and BF16 are", param=tensor.name)
