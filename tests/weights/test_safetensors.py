from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tokenmill.core.errors import ModelFileError
from tokenmill.weights.safetensors import SafetensorsFolder

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def folder(path: Path, files: Mapping[str, bytes | object], config: object = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in ({"config.json": config} | dict(files)).items():
        (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read_all(path: Path) -> int:
    with SafetensorsFolder.open(path) as opened:
        return sum(int(tensor.data.sum() >= 0) * tensor.data.size for tensor in opened.tensors.values())


def test_a_file_of_the_safetensors_package_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = {
        "w": rng.standard_normal((3, 4), np.float32),
        "half": rng.standard_normal((2, 5)).astype(np.float16),
        "norm": rng.standard_normal(7, np.float32),
        "cube": rng.standard_normal((2, 3, 4), np.float32),
    }
    save_file(weights, folder(tmp_path / "m", {}) / "model.safetensors", metadata={"format": "np"})
    with SafetensorsFolder.open(tmp_path / "m") as opened:
        assert opened.config == CONFIG
        assert set(opened.tensors) == set(weights)
        for name, expected in weights.items():
            tensor = opened.tensors[name]
            assert tensor.type == {"float32": "F32", "float16": "F16"}[expected.dtype.name]
            assert (tensor.rows, tensor.cols) == (expected.size // expected.shape[-1], expected.shape[-1])
            assert tensor.data.tobytes() == expected.tobytes()
            assert not tensor.data.flags.writeable


def test_bf16_is_read_as_its_bytes(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model.safetensors": raw_file({"b": entry("BF16", [1, 2], 0, 4)}, b"\x80\x3f\x00\x40")})
    tensor = SafetensorsFolder.open(path).tensors["b"]
    assert (tensor.type, tensor.rows, tensor.cols, bytes(tensor.data)) == ("BF16", 1, 2, b"\x80\x3f\x00\x40")


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    files = {
        "one.safetensors": raw_file({"a": entry("F16", [2], 0, 4)}, b"aaaa"),
        "two.safetensors": raw_file({"b": entry("F16", [2], 0, 4), "c": entry("F16", [], 4, 6)}, b"bbbbcc"),
        "model.safetensors.index.json": {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}},
    }
    tensors = SafetensorsFolder.open(folder(tmp_path / "m", files)).tensors
    assert {name: bytes(tensor.data) for name, tensor in tensors.items()} == {"a": b"aaaa", "b": b"bbbb", "c": b"cc"}
    assert (tensors["c"].rows, tensors["c"].cols) == (1, 1)


GOOD = entry("F32", [2, 2], 0, 16)

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header length is 0, but must be between 2 and -8"),
    "length": (raw_file({}, length=2**62), f"header length is {2**62}, but must be between 2 and 2"),
    "no json": (raw_file(b"not json"), "header is b'not json', but must be JSON"),
    "no utf-8": (raw_file(b'{"\xff": 1}'), "header is .* but must be JSON in UTF-8"),
    "no object": (raw_file(b"[1]"), "header is \\[1\\], but must be a JSON object"),
    "deep nesting": (raw_file(b"[" * 100_000), "header is .* but must be JSON in UTF-8"),
    "long number": (raw_file(b'{"w": ' + b"9" * 10_000 + b"}"), "header is .* but must be JSON in UTF-8"),
    "duplicate": (raw_file(b'{"w": 1, "w": 2}'), "key 'w' appears twice"),
    "no entry": (raw_file({"w": 3}), "tensor 'w' is 3, but must be an object of dtype, shape and data_offsets"),
    "missing field": (raw_file({"w": {"dtype": "F32", "shape": [1]}}), "tensor 'w' is .*data_offsets"),
    "unknown field": (raw_file({"w": GOOD | {"more": 1}}, bytes(16)), "tensor 'w' is .*more"),
    "dtype": (raw_file({"w": entry("F8_E4M3", [16], 0, 16)}, bytes(16)), "dtype of tensor 'w' is 'F8_E4M3', supported are F32, F16, BF16"),
    "extent 0": (raw_file({"w": entry("F32", [0], 0, 0)}), r"shape of tensor 'w' is \[0\], but must be at most 8 extents between 1"),
    "negative extent": (raw_file({"w": entry("F32", [-2, -2], 0, 16)}, bytes(16)), r"shape of tensor 'w' is \[-2, -2\]"),
    "many extents": (raw_file({"w": entry("F32", [2**39] * 10_000, 0, 16)}, bytes(16)), "shape of tensor 'w' is .*at most 8 extents"),
    "overflow": (raw_file({"w": entry("F32", [2**33, 2**33], 0, 16)}, bytes(16)), "data_offsets of tensor 'w' is .*bytes apart"),
    "too short": (raw_file({"w": entry("F32", [2, 2], 0, 12)}, bytes(16)), "must be 16 bytes apart, for F32"),
    "outside": (raw_file({"w": GOOD}, bytes(12)), r"data_offsets of tensor 'w' is \[0, 16\], but must be ascending, and at most 12"),
    "huge offset": (raw_file({"w": entry("F32", [1], 10**300, 10**300 + 4)}, bytes(4)), "data_offsets of tensor 'w' is "),
    "descending": (raw_file({"w": entry("F32", [1], 8, 4)}, bytes(16)), "data_offsets of tensor 'w' is .*ascending"),
    "overlap": (
        raw_file({"a": GOOD, "b": entry("F32", [2], 8, 16)}, bytes(16)),
        "offset of tensor 'b' is .*, but must be at least .*, the end of tensor 'a'",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_field_is_named_and_allocates_no_more_than_the_file(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    path = folder(tmp_path / "m", {"model.safetensors": content})
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message) as caught:
            read_all(path)
        assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 60 * len(content)
    finally:
        tracemalloc.stop()
    assert str(path / "model.safetensors") in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "content is \\[\\], but must be a JSON object"),
        ({}, "weight_map is None, but must be an object"),
        ({"weight_map": {"a": 1}}, "file of tensor 'a' is 1, but must be the name"),
        ({"weight_map": {"a": "../one.safetensors"}}, "file of tensor 'a' is '../one.safetensors'"),
        ({"weight_map": {"a": "/etc/passwd"}}, "file of tensor 'a' is '/etc/passwd'"),
        ({"weight_map": {"a": "absent.safetensors"}}, "absent.safetensors: cannot be read"),
        ({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}, r"only one of the index and one.safetensors is \['b'\]"),
        ({"weight_map": {"b": "one.safetensors"}}, r"only one of the index and one.safetensors is \['a', 'b'\]"),
    ],
)
def test_a_hostile_index_is_named(index: object, message: str, tmp_path: Path) -> None:
    files = {"one.safetensors": raw_file({"a": entry("F16", [2], 0, 4)}, b"aaaa"), "model.safetensors.index.json": index}
    with pytest.raises(ModelFileError, match=message):
        SafetensorsFolder.open(folder(tmp_path / "m", files))


@pytest.mark.parametrize(("config", "message"), [([], "must be a JSON object"), (b"{", "must be JSON"), (b"", "must be JSON")])
def test_a_damaged_config_is_named(config: object, message: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model.safetensors": raw_file({"w": GOOD}, bytes(16))}, config)
    with pytest.raises(ModelFileError, match=message) as caught:
        SafetensorsFolder.open(path)
    assert "config.json" in str(caught.value)


def test_a_folder_without_weights_or_config_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read"):
        SafetensorsFolder.open(tmp_path)
    with pytest.raises(ModelFileError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        SafetensorsFolder.open(folder(tmp_path / "m", {}))


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = raw_file({"w": GOOD, "v": entry("BF16", [3], 16, 22)}, bytes(22))
    path = folder(tmp_path / "m", {})
    for length in range(len(whole)):
        (path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            read_all(path)


@pytest.mark.parametrize("seed", range(2))
def test_mutations_are_read_or_refused(seed: int, tmp_path: Path, damage: Any) -> None:
    header = {"w": GOOD, "v": entry("BF16", [3], 16, 22), "__metadata__": {"format": "pt"}, "h": entry("F16", [2, 1, 2], 22, 30)}
    whole, rng, path = raw_file(header, bytes(30)), random.Random(seed), folder(tmp_path / "m", {})
    refused = 0
    for _ in range(3000):
        (path / "model.safetensors").write_bytes(damage(rng, whole))
        try:
            read_all(path)
        except ModelFileError:
            refused += 1
    assert 1000 < refused < 3000
