"""Hugging Face folders: config.json beside model.safetensors, or beside shards and their index.

The header of a safetensors file is 8 bytes of length and then JSON; the rest is tensor data. As with GGUF nothing is
trusted: what does not fit the file is a `ModelFileError` naming the field.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import ModelFileError
from tokenmill.weights.mapped import MappedFile
from tokenmill.weights.tensor import LAYOUTS, RawTensor

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_MAX_JSON_BYTES = 64 << 20
_MAX_DIMS = 8
_DTYPES = ("F32", "F16", "BF16")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFolder:
    """An open model folder.

    config: config.json as it is. tensors: by name, as views of the mapped files; the data of a tensor need not be
    aligned to its type.
    """

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, RawTensor]) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFolder:
        """Map and check all files of a folder; raises `ModelFileError` naming the file and the field."""
        folder = Path(path)
        config = _read_json(folder / CONFIG)
        if (folder / SINGLE).is_file():
            return cls(folder, config, _read_tensors(MappedFile(folder / SINGLE)))
        if (folder / INDEX).is_file():
            return cls(folder, config, _read_shards(folder))
        raise ModelFileError(f"{folder}: has neither {SINGLE} nor {INDEX}: give a folder in the layout of Hugging Face, or a .gguf file")

    def close(self) -> None:
        """Forget the tensors; the memory maps end with the last view that is still held."""
        self.tensors = {}

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _read_shards(folder: Path) -> dict[str, RawTensor]:
    index = MappedFile(folder / INDEX)
    weight_map = _read_json(index.path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.fault("weight_map", weight_map, "an object from tensor names to file names")
    by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise index.fault(f"file of tensor {name!r}", shard, "the name of a .safetensors file in the same folder")
        by_shard.setdefault(shard, set()).add(name)
    tensors: dict[str, RawTensor] = {}
    for shard, names in by_shard.items():
        found = _read_tensors(MappedFile(folder / shard))
        if names != found.keys():
            differing = sorted(names ^ found.keys())
            raise index.fault(f"set of tensors in only one of the index and {shard}", differing, "empty")
        tensors.update(found)
    return tensors


def read_safetensors(path: Path, remedy: str) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """The tensors of one file, and what it says of itself. Raises `ModelFileError`, which ends with `remedy`."""
    file = MappedFile(path, remedy)
    header, data = _read_header(file)
    try:
        said = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
    except msgspec.ValidationError as error:
        raise file.fault("__metadata__", header, f"an object of strings ({error})") from None
    return _check_tensors(file, header, data), said


def safetensors_bytes(tensors: Mapping[str, npt.NDArray[np.float32]], said: Mapping[str, str]) -> bytes:
    """A file of these tensors, which says `said` of itself; equal for equal content."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(said.items()))}
    data = b""
    for name, tensor in tensors.items():
        header[name] = _Entry("F32", list(tensor.shape), (len(data), len(data) + tensor.nbytes))
        data += tensor.astype("<f4").tobytes()
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def _read_tensors(file: MappedFile) -> dict[str, RawTensor]:
    header, data = _read_header(file)
    header.pop("__metadata__", None)
    return _check_tensors(file, header, data)


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The header, and where the data begins."""
    most = min(MAX_HEADER_BYTES, file.size - 8)
    length = int.from_bytes(file.bytes[:8], "little")
    if not 2 <= length <= most:
        raise file.fault("header length", length, f"between 2 and {most}")
    return _parse_object(file, "header", file.bytes[8 : 8 + length]), 8 + length


def _check_tensors(file: MappedFile, header: dict[str, Any], data: int) -> dict[str, RawTensor]:
    """Every tensor of the header, checked against the file's size."""
    tensors: dict[str, RawTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, raw in header.items():
        tensor, start = _read_tensor(file, name, raw, data)
        tensors[name] = tensor
        spans.append((start, start + tensor.data.size, name))
    file.check_disjoint(spans)
    return tensors


def _read_tensor(file: MappedFile, name: str, raw: object, data: int) -> tuple[RawTensor, int]:
    field = f"tensor {name!r}"
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise file.fault(field, raw, f"an object of dtype, shape and data_offsets ({error})") from None
    if entry.dtype not in _DTYPES:
        raise file.error(f"dtype of {field} is {entry.dtype!r}, supported are {', '.join(_DTYPES)}", "use another file")
    if len(entry.shape) > _MAX_DIMS or not all(1 <= extent < 1 << 40 for extent in entry.shape):
        raise file.fault(f"shape of {field}", entry.shape, f"at most {_MAX_DIMS} extents between 1 and 2^40")
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= file.size - data:
        raise file.fault(f"data_offsets of {field}", [begin, end], f"ascending, and at most {file.size - data}, the bytes after the header")
    cols = entry.shape[-1] if entry.shape else 1
    rows = math.prod(entry.shape[:-1])
    wanted = rows * cols * LAYOUTS[entry.dtype].size
    if end - begin != wanted:
        raise file.fault(f"data_offsets of {field}", [begin, end], f"{wanted} bytes apart, for {entry.dtype} of shape {entry.shape}")
    return RawTensor(name, entry.dtype, rows, cols, file.view(data + begin, data + end)), data + begin


def _read_json(path: Path) -> dict[str, Any]:
    file = MappedFile(path)
    if file.size > _MAX_JSON_BYTES:
        raise file.fault("size", file.size, f"at most {_MAX_JSON_BYTES} bytes")
    return _parse_object(file, "content", file.bytes[:])


def _parse_object(file: MappedFile, field: str, text: bytes) -> dict[str, Any]:
    """Parse a JSON object in which no object has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise ValueError(f"key {twice[:80]!r} appears twice")
        return found

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise file.fault(field, text[:80], f"JSON in UTF-8 ({error})") from None
    if not isinstance(value, dict):
        raise file.fault(field, value, "a JSON object")
    return value
