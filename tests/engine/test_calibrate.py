"""Calibration of a real model: what is found is in its keys and heads, and the file beside the model is taken or refused."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tiny_gguf import TinyModel

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import CalibrationError
from tokenmill.engine import calibrate as module
from tokenmill.engine.build import build_engine
from tokenmill.engine.calibrate import BLOCK, calibrate, find_calibration, repeated_tokens, retrieval_scores
from tokenmill.engine.loading import Loaded, load_model
from tokenmill.kernels.native import Pool
from tokenmill.kernels.ops import Batch, Pages, Segment
from tokenmill.kernels.tape import Tape
from tokenmill.models import calibration as file_module
from tokenmill.models.calibration import Calibration, calibration_path, read_calibration, write_calibration
from tokenmill.models.loader import load
from tokenmill.models.names import GGUF, HF
from tokenmill.text.alphabet import BYTE_TO_CHAR
from tokenmill.text.samples import evaluation_texts
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.safetensors import safetensors_bytes
from tokenmill.weights.vocabulary import load_tokenizer

WHOLE = Pages(np.zeros(1, np.int32), np.zeros(1, np.int32))


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> Loaded:
    return load_model(EngineConfig(model=str(smollm2_path), threads=2))


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def found(loaded: Loaded, tokenizer: Tokenizer) -> Calibration:
    return calibrate(loaded.model, tokenizer, loaded.pool)


@pytest.fixture
def path(smollm2_path: Path, tmp_path: Path) -> Path:
    """The model in a folder of its own."""
    path = tmp_path / "smol.gguf"
    path.symlink_to(smollm2_path)
    return path


def tape_of(loaded: Loaded, rows: int) -> Tape:
    model = loaded.model
    return Tape(model.program, model.weights, model.vectors, loaded.pool, max_rows=rows, max_outputs=1, n_frames=-(-rows // 8))


def test_keys_of_other_texts_lie_in_the_range_that_was_found(loaded: Loaded, tokenizer: Tokenizer, found: Calibration) -> None:
    tape = tape_of(loaded, 256)
    for text in evaluation_texts().values():
        tokens = np.array(tokenizer.encode(text[20_000:22_000])[:256], np.int32)
        tape.run(Batch(tokens, [Segment(0, len(tokens), 0, (WHOLE,))], np.array([0], np.int32)))
        keys = np.abs((tape.keys((WHOLE,), len(tokens)) - found.keys.zero[:, :, None]) / found.keys.factor[:, :, None])
        assert (keys <= 1).mean() > 0.99
        assert np.median(keys.max(axis=2)) > 0.6  # and it is no wider than it has to be


def test_few_heads_retrieve(found: Calibration) -> None:
    ranked = [found.retrieval[pair] for pair in found.ranked()]
    assert ranked == sorted(ranked, reverse=True)
    assert ranked[0] > 0.4
    assert ranked[len(ranked) // 2] < 0.03
    assert found.retrieval.min() >= 0


def test_where_nothing_is_repeated_no_head_retrieves(loaded: Loaded, tokenizer: Tokenizer, found: Calibration) -> None:
    tokens = repeated_tokens(np.array(tokenizer.encode(evaluation_texts()["python"]), np.int32), np.empty(0, np.int32))
    same = retrieval_scores(tape_of(loaded, len(tokens)), loaded.model.program, tokens, lambda tokens: None)
    tokens[BLOCK:] = np.random.default_rng(1).permutation(tokens[BLOCK:])
    other = retrieval_scores(tape_of(loaded, len(tokens)), loaded.model.program, tokens, lambda tokens: None)
    assert same.max() > 0.4
    assert other[found.ranked()[0]] < 0.05
    np.testing.assert_allclose(same, found.retrieval, atol=0.1)  # of other tokens


def test_threads_do_not_change_a_calibration(smollm2_path: Path, tokenizer: Tokenizer, found: Calibration) -> None:
    pool, progress = Pool(1), list[tuple[int, int]]()
    again = calibrate(load(smollm2_path, pool), tokenizer, pool, lambda done, total: progress.append((done, total)))
    assert again.digest == found.digest
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1]


def test_a_model_is_calibrated_once(
    path: Path, loaded: Loaded, found: Calibration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "calibrate", lambda *_: found)
    assert find_calibration(path, loaded) is found
    assert caplog.messages == ["calibrating smol.gguf, which is done once"]
    monkeypatch.setattr(module, "calibrate", _never)
    assert find_calibration(path, loaded).digest == found.digest


def _never(*_: object) -> Calibration:
    raise AssertionError("calibrated twice")


def test_what_an_older_version_found_is_measured_anew(
    path: Path, loaded: Loaded, found: Calibration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = calibration_path(path)
    write_calibration(stored, found, loaded.digest.result())
    monkeypatch.setattr(file_module, "VERSION", 2)
    monkeypatch.setattr(module, "calibrate", lambda *_: found)
    assert find_calibration(path, loaded) is found
    assert caplog.messages == ["calibrating smol.gguf, since smol.calibration is of an older version"]
    monkeypatch.setattr(module, "calibrate", _never)
    assert find_calibration(path, loaded).digest == found.digest


def test_a_link_to_a_model_has_a_calibration_of_its_own(
    path: Path, loaded: Loaded, found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model's folder cannot be written a link from another one helps."""
    link = tmp_path / "elsewhere" / "link.gguf"
    link.parent.mkdir()
    link.symlink_to(path)
    monkeypatch.setattr(module, "calibrate", lambda *_: found)
    find_calibration(link, loaded)
    assert (calibration_path(link).is_file(), calibration_path(path).exists()) == (True, False)
    monkeypatch.setattr(module, "calibrate", _never)
    assert find_calibration(link, loaded).digest == found.digest


def test_a_folder_is_calibrated_and_its_digest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    config = EngineConfig.from_settings(
        model=str(folder), threads=1, kv_cache_config={"compression": {"enabled": True, "key_dtype": "int8"}, "memory_budget_gb": 0.05}
    )
    first = build_engine(config).info.fingerprint
    assert (folder / "tokenmill.calibration").is_file()
    monkeypatch.setattr(module, "calibrate", _never)
    assert build_engine(config).info.fingerprint == first


def tiny_folder(folder: Path) -> Path:
    """A model of random weights that reads bytes, in the layout of Hugging Face."""
    folder.mkdir()
    tiny = TinyModel(vocab=256, context=2048)
    renamed = {GGUF.of(name): HF.of(name) for name in needed_names(tiny.layers)}
    (folder / "model.safetensors").write_bytes(safetensors_bytes({renamed[name]: tensor for name, tensor in tiny.tensors.items()}, {}))
    config = {
        "model_type": "llama",
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.ffn,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.context,
        "vocab_size": tiny.vocab,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    library = tokenizers.Tokenizer(tokenizers.models.BPE({char: id for id, char in enumerate(BYTE_TO_CHAR.values())}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    (folder / "tokenizer.json").write_text(library.to_str())
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def needed_names(layers: int) -> list[str]:
    parts = ("attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "up", "down")
    return ["embed", "final_norm", *(f"{layer}.{part}" for layer in range(layers) for part in parts)]


def test_a_folder_that_cannot_be_written_costs_the_file_only(
    path: Path, loaded: Loaded, found: Calibration, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(module, "calibrate", lambda *_: found)
    monkeypatch.setattr(module, "write_calibration", refuse)
    with caplog.at_level(logging.WARNING):
        assert find_calibration(path, loaded) is found
    assert "cannot be kept for the next time: [Errno 30] Read-only file system" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda stored, found: write_calibration(stored, found, b"another model"), "belongs to another model"),
        (lambda stored, found: stored.write_bytes(b"\0" * 100), "header length is 0"),
    ],
)
def test_a_file_that_is_not_this_models_is_refused_and_stays(
    path: Path, loaded: Loaded, found: Calibration, spoil: Callable[[Path, Calibration], None], message: str
) -> None:
    stored = calibration_path(path)
    spoil(stored, found)
    before = stored.read_bytes()
    with pytest.raises(CalibrationError, match=rf"smol\.calibration:? {message}.*run `tokenmill calibrate MODEL`"):
        find_calibration(path, loaded)
    assert stored.read_bytes() == before
    shape = found.keys.factor.shape
    write_calibration(stored, found, loaded.digest.result())
    assert read_calibration(stored, loaded.digest.result(), (shape[0], shape[1], shape[2])).digest == find_calibration(path, loaded).digest
