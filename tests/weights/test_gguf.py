from __future__ import annotations

import contextlib
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tokenmill.core.errors import ModelFileError
from tokenmill.weights.gguf import GGUFFile
from tokenmill.weights.tensor import LAYOUTS


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def as_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_equal_to_oracle(path: Path) -> None:
    """Every value and every byte as PyPI's gguf reads them."""
    oracle = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        fields = {name: field for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for name, field in fields.items():
            expected = field.contents()
            assert as_plain(file.metadata[name]) == expected, name
        assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
        for theirs in oracle.tensors:
            ours = file.tensors[theirs.name]
            shape = [int(extent) for extent in theirs.shape]
            assert (ours.type, ours.cols, ours.rows) == (theirs.tensor_type.name, shape[0], int(np.prod(shape[1:], dtype=np.int64)))
            assert np.array_equal(ours.data, np.ascontiguousarray(theirs.data).reshape(-1).view(np.uint8)), theirs.name


def test_smollm2_reads_as_the_gguf_package_reads_it(smollm2_path: Path) -> None:
    assert_equal_to_oracle(smollm2_path)


def test_all_value_kinds_and_tensor_types_read_as_the_gguf_package_reads_them(tmp_path: Path, gguf_bytes: Any) -> None:
    path = write(tmp_path / "all.gguf", gguf_bytes.everything())
    assert_equal_to_oracle(path)
    with GGUFFile.open(path) as file:
        assert {tensor.type for tensor in file.tensors.values()} == set(LAYOUTS)
        assert isinstance(file.metadata["texts"], list)
        assert isinstance(file.metadata["array.6"], np.ndarray)
        assert file.metadata["scalar.7"] is True
        assert file.metadata["array.7"].dtype == np.bool_


def test_a_file_of_the_gguf_packages_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("w", weights)
    writer.add_tensor("v", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
        assert (file.tensors["w"].rows, file.tensors["w"].cols) == (3, 4)
        assert np.array_equal(file.tensors["w"].data.view(np.float32), weights.reshape(-1))
        assert (file.tensors["v"].rows, file.tensors["v"].cols) == (1, 4)


def test_opening_a_real_file_takes_far_less_than_reading_its_vocabulary_may(smollm2_path: Path) -> None:
    start = time.perf_counter()
    file = GGUFFile.open(smollm2_path)
    opened = time.perf_counter()
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    decoded = time.perf_counter()
    assert opened - start < 0.15
    assert decoded - start < 0.3


def test_strings_are_decoded_only_when_asked_for(tmp_path: Path, gguf_bytes: Any) -> None:
    bad = struct.pack("<IQ", 8, 2) + gguf_bytes.text(b"fine") + gguf_bytes.text(b"\xff\xfe")
    data = gguf_bytes.header(0, 2) + gguf_bytes.entry("tokens", 9, bad) + gguf_bytes.entry("n", 4, struct.pack("<I", 7))
    with GGUFFile.open(write(tmp_path / "bad.gguf", data)) as file:
        assert file.metadata["n"] == 7
        with pytest.raises(ModelFileError, match=r"metadata 'tokens', string 1 is b'\\xff\\xfe', but must be UTF-8"):
            file.metadata["tokens"]


def test_tensor_data_is_a_read_only_view(tmp_path: Path, gguf_bytes: Any) -> None:
    with GGUFFile.open(write(tmp_path / "all.gguf", gguf_bytes.everything())) as file:
        data = file.tensors["norm"].data
        assert not data.flags.writeable
        assert not data.flags.owndata


def test_data_outlives_close(tmp_path: Path, gguf_bytes: Any) -> None:
    file = GGUFFile.open(write(tmp_path / "all.gguf", gguf_bytes.everything()))
    data = file.tensors["norm"].data
    before = bytes(data)
    file.close()
    assert not file.tensors
    assert not file.metadata
    assert bytes(data) == before


def test_expect_gives_the_type_or_an_error_that_names_the_key(tmp_path: Path, gguf_bytes: Any) -> None:
    data = gguf_bytes.file([("i", 4, 3), ("f", 6, 0.5), ("s", 8, "x"), ("b", 7, False)])
    meta = GGUFFile.open(write(tmp_path / "m.gguf", data)).metadata
    assert (meta.expect("i", int), meta.expect("i", float), meta.expect("f", float)) == (3, 3.0, 0.5)
    assert (meta.expect("s", str), meta.expect("b", bool), meta.expect("absent", int, 9)) == ("x", False, 9)
    with pytest.raises(ModelFileError, match="metadata key 'absent' is missing"):
        meta.expect("absent", int)
    with pytest.raises(ModelFileError, match="metadata 's' is 'x', but must be of type int"):
        meta.expect("s", int)
    with pytest.raises(ModelFileError, match="metadata 'b' is False, but must be of type int"):
        meta.expect("b", int)


HUGE = 2**60

HOSTILE = {
    "not gguf": (lambda g: g.header(0, 0, magic=b"GGML"), "magic is b'GGML', but must be b'GGUF'"),
    "version 1": (lambda g: g.header(0, 0, version=1), "version is 1, but must be 2 or 3"),
    "big endian": (lambda g: g.header(0, 0, version=3 << 24), "big-endian"),
    "tensor count": (lambda g: g.header(HUGE, 0), f"tensor count is {HUGE}, but must be at most 0"),
    "key count": (lambda g: g.header(0, HUGE), f"metadata count is {HUGE}, but must be at most 0"),
    "key length": (
        lambda g: g.header(0, 1) + struct.pack("<Q", HUGE) + bytes(20),
        f"length of key 0 is {HUGE}, but must be between 1 and 20",
    ),
    "empty key": (lambda g: g.header(0, 1) + g.entry("", 0, b"\1"), "length of key 0 is 0, but must be between 1"),
    "key bytes": (lambda g: g.header(0, 1) + g.text(b"\xff") + struct.pack("<IB", 0, 1), r"key 0 is b'\\xff', but must be UTF-8"),
    "duplicate key": (lambda g: g.file([("k", 0, 1), ("k", 0, 2)]), "key 1 is 'k', but must be different"),
    "value type": (lambda g: g.header(0, 1) + g.entry("k", 13, bytes(8)), "type of metadata 'k' is 13, but must be between 0 and 12"),
    "scalar outside": (lambda g: g.header(0, 1) + g.entry("k", 10, bytes(4)), "length of metadata 'k' is 1, but must be at most 0"),
    "string outside": (lambda g: g.header(0, 1) + g.entry("k", 8, struct.pack("<Q", HUGE)), "end of the last string of metadata 'k' is"),
    "array length": (
        lambda g: g.header(0, 1) + g.entry("k", 9, struct.pack("<IQ", 4, HUGE)),
        f"length of metadata 'k' is {HUGE}, but must be at most 0",
    ),
    "strings": (
        lambda g: g.header(0, 1) + g.entry("k", 9, struct.pack("<IQ", 8, HUGE)),
        f"length of metadata 'k' is {HUGE}, but must be at most 0",
    ),
    "string inside array": (
        lambda g: g.header(0, 1) + g.entry("k", 9, struct.pack("<IQQ", 8, 2, 2**64 - 1) + bytes(8)),
        "end of string 1 of metadata 'k' is",
    ),
    "nested array": (lambda g: g.header(0, 1) + g.entry("k", 9, struct.pack("<IQ", 9, 1) + bytes(20)), "nested arrays are not supported"),
    "alignment 0": (lambda g: g.file([("general.alignment", 4, 0)]), "metadata 'general.alignment' is 0, but must be a power of two"),
    "alignment 48": (lambda g: g.file([("general.alignment", 4, 48)]), "metadata 'general.alignment' is 48"),
    "alignment text": (lambda g: g.file([("general.alignment", 8, "32")]), "metadata 'general.alignment' is '32', but must be of type int"),
    "bool 2": (lambda g: g.header(0, 1) + g.entry("k", 7, b"\2"), "metadata 'k' is 2, but must be 0 or 1"),
    "tensor name": (
        lambda g: g.file([], [("n" * 65, (1,), 0, bytes(4))]),
        "name of tensor 0 is 65, but must be between 1 and 64",
    ),
    "duplicate tensor": (lambda g: g.file([], [("t", (1,), 0, bytes(4))] * 2), "name of tensor 1 is 't', but must be different"),
    "no dims": (
        lambda g: g.header(1, 0) + g.tensor("t", (), 0, 0) + bytes(64),
        "dimension count of tensor 't' is 0, but must be bet",
    ),
    "many dims": (lambda g: g.header(1, 0) + g.tensor("t", (1,) * 5, 0, 0) + bytes(64), "dimension count of tensor 't' is 5"),
    "extent 0": (
        lambda g: g.header(1, 0) + g.tensor("t", (4, 0), 0, 0) + bytes(64),
        "dimension 1 of tensor 't' is 0, but must be",
    ),
    "extent overflow": (lambda g: g.header(1, 0) + g.tensor("t", (2**63, 2), 0, 0) + bytes(64), f"dimension 0 of tensor 't' is {2**63}"),
    "product overflow": (lambda g: g.header(1, 0) + g.tensor("t", (2**32, 2**32), 0, 0) + bytes(64), "end of tensor 't' is"),
    "type Q2_K": (
        lambda g: g.header(1, 0) + g.tensor("t", (256,), 10, 0) + bytes(64),
        "type of tensor 't' is Q2_K, supported are F32",
    ),
    "type 99": (lambda g: g.header(1, 0) + g.tensor("t", (256,), 99, 0) + bytes(64), "type of tensor 't' is number 99, supported are"),
    "part of a block": (
        lambda g: g.header(1, 0) + g.tensor("t", (48, 2), 8, 0) + bytes(640),
        "dimension 0 of tensor 't' is 48, but must be a multiple of 32, the block of Q8_0",
    ),
    "part of a super-block": (
        lambda g: g.header(1, 0) + g.tensor("t", (128,), 12, 0) + bytes(640),
        "multiple of 256, the block of Q4_K",
    ),
    "offset not aligned": (
        lambda g: g.header(1, 0) + g.tensor("t", (1,), 0, 4) + bytes(64),
        "offset of tensor 't' is 4, but must be a",
    ),
    "offset outside": (lambda g: g.header(1, 0) + g.tensor("t", (1,), 0, HUGE) + bytes(64), "end of tensor 't' is"),
    "overlap": (
        lambda g: g.header(2, 0) + g.tensor("a", (16,), 0, 0) + g.tensor("b", (4,), 0, 32) + bytes(256),
        "offset of tensor 'b' is .*, but must be at least .*, the end of tensor 'a'",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_field_is_named_and_allocates_nothing(case: str, tmp_path: Path, gguf_bytes: Any) -> None:
    make, message = HOSTILE[case]
    path = write(tmp_path / "hostile.gguf", make(gguf_bytes))
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=message) as caught:
            read_all(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_every_truncation_is_an_error(tmp_path: Path, gguf_bytes: Any) -> None:
    whole = gguf_bytes.everything()
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            read_all(path)


def test_what_is_no_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf", Path("/dev/zero"), write(tmp_path / "empty.gguf", b"")):
        with pytest.raises(ModelFileError, match=str(path)):
            GGUFFile.open(path)


def read_all(path: Path) -> int:
    """Everything a program could ask of the file; returns the number of tensor bytes."""
    with GGUFFile.open(path) as file:
        for key in file.metadata:
            file.metadata[key]
        return sum(int(tensor.data.sum() >= 0) * tensor.data.size for tensor in file.tensors.values())


@pytest.mark.parametrize("seed", range(4))
def test_mutations_of_a_small_file_are_read_or_refused(seed: int, tmp_path: Path, gguf_bytes: Any, damage: Any) -> None:
    whole, rng, path = gguf_bytes.everything(), random.Random(seed), tmp_path / "mutated.gguf"
    refused = 0
    for _ in range(3000):
        path.write_bytes(damage(rng, whole))
        try:
            read_all(path)
        except ModelFileError:
            refused += 1
    assert 1000 < refused < 3000


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_mutations_of_the_real_header_are_read_or_refused(count: int, tmp_path: Path, smollm2_path: Path) -> None:
    """Damages the first megabyte in place; the weights behind it are a hole of the real size."""
    path, rng, size = tmp_path / "mutated.gguf", random.Random(count), smollm2_path.stat().st_size
    with smollm2_path.open("rb") as real:
        head = real.read(4 << 20)
    write(path, head)
    refused = 0
    with path.open("r+b") as file:
        file.truncate(size)
        for _ in range(count):
            places = [rng.choice([rng.randrange(1 << 20), rng.randrange(2000)]) for _ in range(rng.randint(1, 4))]
            for at in places:
                file.seek(at)
                file.write(rng.choice([rng.randbytes(1), rng.randbytes(8), struct.pack("<Q", rng.choice([0, HUGE, 2**64 - 1, 2**32]))]))
            file.flush()
            try:
                with GGUFFile.open(path) as opened:
                    for key in opened.metadata:
                        opened.metadata[key]
            except ModelFileError:
                refused += 1
            for at in places:
                file.seek(at)
                file.write(head[at : at + 8])
    assert 0 < refused < count


KINDS = {
    0: st.integers(0, 255), 1: st.integers(-128, 127), 2: st.integers(0, 2**16 - 1), 3: st.integers(-(2**15), 2**15 - 1),
    4: st.integers(0, 2**32 - 1), 5: st.integers(-(2**31), 2**31 - 1), 6: st.floats(width=32, allow_nan=False), 7: st.booleans(),
    8: st.text(st.characters(exclude_categories=["Cs"])), 10: st.integers(0, 2**64 - 1), 11: st.integers(-(2**63), 2**63 - 1),
    12: st.floats(allow_nan=False),
}  # fmt: skip
SCALARS = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), KINDS[kind]))
ARRAYS = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.tuples(st.just(9), st.tuples(st.just(kind), st.lists(KINDS[kind], max_size=5)))
)
METADATA = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), SCALARS | ARRAYS, max_size=6)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=METADATA)
def test_any_metadata_comes_back_as_written(metadata: dict[str, Any], tmp_path: Path, gguf_bytes: Any) -> None:
    assume("general.alignment" not in metadata)
    data = gguf_bytes.file([(key, kind, value) for key, (kind, value) in metadata.items()])
    with GGUFFile.open(write(tmp_path / "any.gguf", data)) as file:
        assert {key: as_plain(file.metadata[key]) for key in file.metadata} == {
            key: value[1] if kind == 9 else value for key, (kind, value) in metadata.items()
        }


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tail=st.binary(max_size=200), tensors=st.integers(0, 3), keys=st.integers(0, 3))
def test_arbitrary_bytes_are_read_or_refused(tail: bytes, tensors: int, keys: int, tmp_path: Path, gguf_bytes: Any) -> None:
    path = write(tmp_path / "any.gguf", gguf_bytes.header(tensors, keys) + tail)
    with contextlib.suppress(ModelFileError):
        read_all(path)
