"""The file of a calibration: what is written is read again, and anything else is refused with what to do."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tokenmill.core.errors import CalibrationError
from tokenmill.kernels.layout import KeyCalibration
from tokenmill.models import calibration as module
from tokenmill.models.calibration import Calibration, calibration_path, check_place, read_calibration, write_calibration
from tokenmill.weights.safetensors import safetensors_bytes

SHAPE = (3, 2, 32)
MODEL = bytes(range(32))


@pytest.fixture
def found() -> Calibration:
    rng = np.random.default_rng(0)
    keys = KeyCalibration(rng.uniform(0.1, 8, SHAPE).astype(np.float32), rng.uniform(-300, 300, SHAPE).astype(np.float32))
    return Calibration(keys, rng.random(SHAPE[:2]).astype(np.float32))


@pytest.fixture
def path(tmp_path: Path, found: Calibration) -> Path:
    path = tmp_path / "model.calibration"
    write_calibration(path, found, MODEL)
    return path


def test_what_is_written_is_read(path: Path, found: Calibration) -> None:
    again = read_calibration(path, MODEL, SHAPE)
    np.testing.assert_array_equal(again.keys.factor, found.keys.factor)
    np.testing.assert_array_equal(again.keys.zero, found.keys.zero)
    np.testing.assert_array_equal(again.retrieval, found.retrieval)
    assert again.digest == found.digest
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("tensor", ["factor", "zero", "retrieval"])
def test_the_digest_is_that_of_all_numbers(found: Calibration, tensor: str) -> None:
    parts = {"factor": found.keys.factor, "zero": found.keys.zero, "retrieval": found.retrieval}
    changed = parts[tensor].copy()
    changed.flat[-1] = np.nextafter(changed.flat[-1], np.float32(9), dtype=np.float32)
    parts[tensor] = changed
    assert Calibration(KeyCalibration(parts["factor"], parts["zero"]), parts["retrieval"]).digest != found.digest


def test_the_file_is_beside_the_model_and_no_weights_to_anybody(tmp_path: Path) -> None:
    assert calibration_path(tmp_path / "qwen2.5-coder-0.5b.gguf") == tmp_path / "qwen2.5-coder-0.5b.calibration"
    assert calibration_path(tmp_path / "qwen2.5-coder-0.5b") == tmp_path / "qwen2.5-coder-0.5b.calibration"
    assert calibration_path(tmp_path) == tmp_path / "tokenmill.calibration"


def test_the_file_of_another_model_is_refused(path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"belongs to another model .*tokenmill calibrate MODEL"):
        read_calibration(path, MODEL[::-1], SHAPE)


@pytest.mark.parametrize("shape", [(3, 2, 64), (2, 2, 32), (4, 2, 32)])
def test_another_shape_is_refused(path: Path, shape: tuple[int, int, int]) -> None:
    with pytest.raises(CalibrationError, match=r"no keys\.factor of shape .*tokenmill calibrate MODEL"):
        read_calibration(path, MODEL, shape)


def test_a_newer_version_is_refused_and_an_older_one_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(module, "VERSION", 0)
        with pytest.raises(CalibrationError, match=r"version is '1', but this program reads versions up to 0: run `tokenmill cal"):
            read_calibration(path, MODEL, SHAPE)
    monkeypatch.setattr(module, "VERSION", 2)
    assert read_calibration(path, MODEL, SHAPE) is None
    with pytest.raises(CalibrationError, match="belongs to another model"):
        read_calibration(path, MODEL[::-1], SHAPE)


def test_a_damaged_file_is_refused_wherever_the_damage_is(path: Path) -> None:
    """Any byte but the header's padding and names of nothing: the calibration is refused, or is still the same."""
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    original = read_calibration(path, MODEL, SHAPE).digest
    refused = list[str]()
    for at in [*range(0, 400, 7), *rng.integers(400, len(whole), 60)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        try:
            assert read_calibration(path, MODEL, SHAPE).digest == original
        except CalibrationError as error:
            refused.append(str(error))
    assert len(refused) > 100
    for message in refused:
        assert (message.count(str(path)), message.count("tokenmill calibrate MODEL")) == (1, 1)
        assert not any(other in message for other in ("fetch it again", "another file"))


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CalibrationError, match=r"model\.calibration: .* must be .*: run `tokenmill calibrate MODEL`"):
        read_calibration(path, MODEL, SHAPE)


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_factors_that_keys_cannot_be_divided_by_are_refused(path: Path, found: Calibration, factor: float) -> None:
    broken = found.keys.factor.copy()
    broken[1, 1, 5] = factor
    write_calibration(path, dataclasses.replace(found, keys=KeyCalibration(broken, found.keys.zero)), MODEL)
    with pytest.raises(CalibrationError, match="factor of keys"):
        read_calibration(path, MODEL, SHAPE)


def test_a_file_without_a_word_about_itself_is_refused(path: Path) -> None:
    path.write_bytes(safetensors_bytes({"retrieval": np.zeros((3, 2), np.float32)}, {}))
    with pytest.raises(CalibrationError, match="version is ''"):
        read_calibration(path, MODEL, SHAPE)


def test_pairs_are_ranked_by_score_and_then_by_place(found: Calibration) -> None:
    scores = np.array([[0.1, 0.5], [0.5, 0.0], [0.1, 0.9]], np.float32)
    assert dataclasses.replace(found, retrieval=scores).ranked() == [(2, 1), (0, 1), (1, 0), (0, 0), (2, 0), (1, 1)]


@pytest.mark.parametrize(("keep_ratio", "kept"), [(1.0, 5), (0.7, 4), (0.6, 3), (0.2, 1), (0.01, 1)])
def test_heads_that_retrieve_stay_whole(found: Calibration, keep_ratio: float, kept: int) -> None:
    scores = np.array([[0.1, 0.5], [0.5, 0.0], [0.2, 0.9]], np.float32)
    order = [(0, 1), (1, 0), (2, 0), (0, 0), (1, 1)]
    whole, streaming = dataclasses.replace(found, retrieval=scores).divide({(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}, keep_ratio)
    assert (whole, streaming) == (order[:kept], order[kept:])


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, found: Calibration) -> None:
    (tmp_path / "model.calibration").mkdir()
    for attempt in (lambda path: write_calibration(path, found, MODEL), check_place):
        with pytest.raises(OSError, match=r"model\.calibration"):
            attempt(tmp_path / "model.calibration")
        assert [file.name for file in tmp_path.iterdir()] == ["model.calibration"]


def test_what_a_killed_writer_left_is_used_up_by_the_next(path: Path, found: Calibration) -> None:
    left = path.with_name("model.calibration.new")
    for next_one in (lambda: write_calibration(path, found, MODEL), lambda: check_place(path)):
        left.write_bytes(bytes(2 * path.stat().st_size))
        next_one()
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        assert read_calibration(path, MODEL, SHAPE).digest == found.digest


def test_a_place_that_is_checked_has_its_file_still(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    check_place(path)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        check_place(tmp_path / "no such folder" / "model.calibration")


def test_many_may_write_at_the_same_time(path: Path, found: Calibration) -> None:
    """Engines of one process as well as processes: whoever reads finds a whole file."""
    with ThreadPoolExecutor(4) as writers:
        writing = [
            job for _ in range(60) for job in (writers.submit(write_calibration, path, found, MODEL), writers.submit(check_place, path))
        ]
        while not all(job.done() for job in writing):
            assert read_calibration(path, MODEL, SHAPE).digest == found.digest
        for job in writing:
            job.result()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
