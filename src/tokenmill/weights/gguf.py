"""GGUF files, version 2 and 3, little endian, read through a memory map.

Nothing in the file is trusted: each count, offset, length, type and shape is checked against the file's size before
it is used, and what fails is a `ModelFileError` naming the field. Opening walks the metadata without decoding it:
a value is decoded, and its text checked to be UTF-8, when it is first asked for, so that an engine which needs no
vocabulary does not pay for 300,000 strings. Text that is not UTF-8 is an error and not patched up with surrogates,
because those would fail later and elsewhere, in a tokenizer or on a terminal.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tokenmill.core.errors import ModelFileError
from tokenmill.weights.mapped import MappedFile
from tokenmill.weights.tensor import LAYOUTS, RawTensor

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 24
"""Strings in all arrays of a file together; bounds the walk over a hostile file to about two seconds."""

_MAX_KEY_BYTES = 65535
_MAX_TENSOR_NAME_BYTES = 64
_MAX_DIMS = 4
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip

_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of all types, the unsupported ones too, so that an error can say what the file holds."""

T = TypeVar("T")


class _Value(NamedTuple):
    """Where a metadata value lies: `length` None for a scalar; `offset` is that of the first element."""

    kind: int
    offset: int
    length: int | None


class Metadata(Mapping[str, Any]):
    """The key-value part of a file, decoded on first access.

    Numbers are int, float or bool, texts str, arrays of texts list[str], arrays of numbers NumPy arrays. An access
    raises `KeyError` for an absent key and `ModelFileError` for a text that is not UTF-8 or a bool that is not 0 or 1.
    """

    def __init__(self, file: MappedFile, values: Mapping[str, _Value]) -> None:
        self._file = file
        self._values = values
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            self._decoded[key] = self._decode(key, self._values[key])
        return self._decoded[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def expect(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key` as `kind`: int, float (takes an int too), bool, str, list (of str) or np.ndarray.

        Raises `ModelFileError` when it has another type, or is absent and there is no default.
        """
        if key not in self._values:
            if default is None:
                raise ModelFileError(f"{self._file.path}: metadata key {key!r} is missing: the file does not describe its model")
            return default
        value = self[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self._file.fault(f"metadata {key!r}", value, f"of type {kind.__name__}")
        return value

    def _decode(self, key: str, value: _Value) -> Any:
        count = 1 if value.length is None else value.length
        if value.kind == _STRING:
            texts = self._texts(key, value.offset, count)
            return texts[0] if value.length is None else texts
        dtype = _NUMBERS[value.kind]
        numbers = self._file.view(value.offset, value.offset + count * dtype.itemsize).view(dtype)
        if value.kind == _BOOL:
            if numbers.size and numbers.max() > 1:
                raise self._file.fault(f"metadata {key!r}", int(numbers.max()), "0 or 1, it is a bool")
            numbers = numbers.astype(np.bool_)
        return numbers[0].item() if value.length is None else numbers.copy()

    def _texts(self, key: str, offset: int, count: int) -> list[str]:
        data, length_at = self._file.bytes, _U64.unpack_from
        texts = []
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            try:
                texts.append(data[start:offset].decode())
            except UnicodeDecodeError as error:
                shown = data[start:offset][:80]
                raise self._file.fault(f"metadata {key!r}, string {len(texts)}", shown, f"UTF-8 ({error.reason})") from None
        return texts


class GGUFFile:
    """An open GGUF file.

    metadata: see `Metadata`. tensors: by name, in the file's order, as views of the mapped file.
    """

    def __init__(self, path: Path, metadata: Metadata, tensors: dict[str, RawTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map and check a file; raises `ModelFileError` naming the first field that cannot be."""
        file = MappedFile(Path(path))
        header = _Header(file)
        tensor_count, key_count = header.counts()
        metadata = Metadata(file, header.values(key_count))
        tensors = header.tensors(tensor_count, metadata)
        return cls(file.path, metadata, tensors)

    def close(self) -> None:
        """Forget metadata and tensors; the memory map ends with the last view of it that is still held."""
        self.metadata = Metadata(self.metadata._file, {})
        self.tensors = {}

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Header:
    """A position that moves through everything before the tensor data."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.offset = 0
        self.strings = 0

    def counts(self) -> tuple[int, int]:
        """Check magic and version; returns (tensors, metadata keys)."""
        magic = bytes(self.file.bytes[:4])
        if magic != b"GGUF":
            raise self.file.fault("magic", magic, "b'GGUF'")
        self.offset = 4
        version = self._u32("version")
        if version in (2 << 24, 3 << 24):
            raise ModelFileError(f"{self.file.path}: a big-endian GGUF file: only little-endian files are supported, convert it first")
        if version not in (2, 3):
            raise self.file.fault("version", version, "2 or 3")
        tensors = self._u64("tensor count")
        keys = self._u64("metadata count")
        self._check_count("tensor count", tensors, MAX_TENSORS, _MIN_TENSOR_BYTES)
        self._check_count("metadata count", keys, MAX_KEYS, _MIN_ENTRY_BYTES)
        return tensors, keys

    def values(self, count: int) -> dict[str, _Value]:
        """Walk over `count` metadata entries, decoding keys only."""
        values: dict[str, _Value] = {}
        for index in range(count):
            key = self._name(f"key {index}", _MAX_KEY_BYTES)
            if key in values:
                raise self.file.fault(f"key {index}", key, "different from all keys before it")
            values[key] = self._value(f"metadata {key!r}")
        return values

    def tensors(self, count: int, metadata: Metadata) -> dict[str, RawTensor]:
        """Read `count` tensor descriptions; each must lie inside the file, aligned, and apart from the others."""
        alignment = metadata.expect("general.alignment", int, 32)
        if not 8 <= alignment <= 65536 or alignment & (alignment - 1):
            raise self.file.fault("metadata 'general.alignment'", alignment, "a power of two between 8 and 65536")
        found: dict[str, tuple[str, int, int, int]] = {}
        for index in range(count):
            name = self._name(f"name of tensor {index}", _MAX_TENSOR_NAME_BYTES)
            if name in found:
                raise self.file.fault(f"name of tensor {index}", name, "different from all names before it")
            found[name] = self._tensor(name)
        data = -(-self.offset // alignment) * alignment
        tensors: dict[str, RawTensor] = {}
        spans: list[tuple[int, int, str]] = []
        for name, (kind, rows, cols, offset) in found.items():
            layout = LAYOUTS[kind]
            start = data + offset
            end = start + rows * (cols // layout.block) * layout.size
            if offset % alignment:
                raise self.file.fault(f"offset of tensor {name!r}", offset, f"a multiple of {alignment}, the file's alignment")
            if end > self.file.size:
                raise self.file.fault(f"end of tensor {name!r}", end, f"at most {self.file.size}, the size of the file")
            spans.append((start, end, name))
            tensors[name] = RawTensor(name, kind, rows, cols, self.file.view(start, end))
        self.file.check_disjoint(spans)
        return tensors

    def _tensor(self, name: str) -> tuple[str, int, int, int]:
        """(type, rows, cols, offset into the data) of the tensor whose name was just read."""
        field = f"tensor {name!r}"
        dims = self._u32(f"dimension count of {field}")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.file.fault(f"dimension count of {field}", dims, f"between 1 and {_MAX_DIMS}")
        shape = [self._u64(f"dimension {i} of {field}") for i in range(dims)]
        for i, extent in enumerate(shape):
            if not 1 <= extent < 1 << 40:
                raise self.file.fault(f"dimension {i} of {field}", extent, "between 1 and 2^40")
        code = self._u32(f"type of {field}")
        kind = _TENSOR_TYPES.get(code, f"number {code}")
        if kind not in LAYOUTS:
            raise ModelFileError(f"{self.file.path}: type of {field} is {kind}, supported are {', '.join(LAYOUTS)}: use another file")
        cols, block = shape[0], LAYOUTS[kind].block
        if cols % block:
            raise self.file.fault(f"dimension 0 of {field}", cols, f"a multiple of {block}, the block of {kind}")
        return kind, math.prod(shape[1:]), cols, self._u64(f"offset of {field}")

    def _value(self, field: str) -> _Value:
        kind = self._u32(f"type of {field}")
        if kind != _ARRAY:
            value = _Value(kind, self.offset, None)
            self._skip(field, kind, 1)
            return value
        kind = self._u32(f"element type of {field}")
        count = self._u64(f"length of {field}")
        value = _Value(kind, self.offset, count)
        self._skip(field, kind, count)
        return value

    def _skip(self, field: str, kind: int, count: int) -> None:
        """Move past `count` elements of type `kind`, all of which must lie in the file."""
        if kind == _STRING:
            self._skip_strings(field, count)
        elif kind in _NUMBERS:
            self._check_count(f"length of {field}", count, self.file.size, _NUMBERS[kind].itemsize)
            self.offset += count * _NUMBERS[kind].itemsize
        elif kind == _ARRAY:
            raise self.file.fault(f"element type of {field}", "array", "a number or a string: nested arrays are not supported")
        else:
            raise self.file.fault(f"type of {field}", kind, "between 0 and 12")

    def _skip_strings(self, field: str, count: int) -> None:
        self._check_count(f"length of {field}", count, MAX_STRINGS - self.strings, 8)
        self.strings += count
        data, length_at, offset, last = self.file.bytes, _U64.unpack_from, self.offset, self.file.size - 8
        for index in range(count):
            if offset > last:
                raise self.file.fault(f"end of string {index} of {field}", offset, f"at most {last}, inside the file")
            offset += 8 + length_at(data, offset)[0]
        if offset > self.file.size:
            raise self.file.fault(f"end of the last string of {field}", offset, f"at most {self.file.size}, the size of the file")
        self.offset = offset

    def _check_count(self, field: str, count: int, limit: int, least_bytes: int) -> None:
        most = min(limit, (self.file.size - self.offset) // least_bytes)
        if count > most:
            raise self.file.fault(field, count, f"at most {most}")

    def _name(self, field: str, limit: int) -> str:
        length = self._u64(f"length of {field}")
        most = min(limit, self.file.size - self.offset)
        if not 1 <= length <= most:
            raise self.file.fault(f"length of {field}", length, f"between 1 and {most} bytes")
        raw = self.file.bytes[self.offset : self.offset + length]
        self.offset += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.file.fault(field, raw[:80], f"UTF-8 ({error.reason})") from None

    def _u32(self, field: str) -> int:
        return self._integer(field, _U32)

    def _u64(self, field: str) -> int:
        return self._integer(field, _U64)

    def _integer(self, field: str, form: struct.Struct) -> int:
        if self.offset > self.file.size - form.size:
            raise self.file.fault(f"end of {field}", self.offset + form.size, f"at most {self.file.size}, the size of the file")
        (value,) = form.unpack_from(self.file.bytes, self.offset)
        self.offset += form.size
        return int(value)
