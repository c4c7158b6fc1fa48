from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import ModelFileError
from tokenmill.text.cache import DefinitionCache
from tokenmill.text.definition import Definition
from tokenmill.text.from_gguf import define_from_metadata
from tokenmill.weights import vocabulary
from tokenmill.weights.vocabulary import load_tokenizer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "tokenizers"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time a vocabulary is built from metadata."""
    built: list[Any] = []

    def counted(metadata: Any) -> Definition:
        built.append(metadata)
        return define_from_metadata(metadata)

    monkeypatch.setattr(vocabulary, "define_from_metadata", counted)
    return built


@pytest.fixture
def folder(tmp_path: Path, byte_level: Callable[..., dict[str, Any]]) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    whole = json.loads(define_from_metadata(byte_level()).model) | {"decoder": decoder}
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder


def test_a_warm_start_opens_no_model_file(home: Path, builds: list[Any], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = load_tokenizer(smollm2_path)
    monkeypatch.delattr(vocabulary, "GGUFFile")
    warm = load_tokenizer(smollm2_path)
    assert len(builds) == 1
    assert warm.encode("Hello <|im_end|>") == cold.encode("Hello <|im_end|>")
    assert (warm.eos_ids, warm.chat_template, warm.vocab_size) == (cold.eos_ids, cold.chat_template, cold.vocab_size)
    assert [warm.token_bytes(id) for id in range(warm.vocab_size)] == [cold.token_bytes(id) for id in range(cold.vocab_size)]


def damage_cut(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-100])


def damage_flip(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)


def damage_empty(entry: Path) -> None:
    entry.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_empty])
def test_a_damaged_entry_is_built_again(home: Path, builds: list[Any], smollm2_path: Path, damage: Callable[[Path], None]) -> None:
    expected = load_tokenizer(smollm2_path).encode("Hello")
    (entry,) = home.iterdir()
    whole = entry.read_bytes()
    damage(entry)
    assert load_tokenizer(smollm2_path).encode("Hello") == expected
    assert len(builds) == 2
    assert entry.read_bytes() == whole
    assert list(home.iterdir()) == [entry]


def test_a_changed_file_is_another_entry(home: Path, builds: list[Any], smollm2_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    shutil.copy(smollm2_path, copy)
    load_tokenizer(copy)
    os.utime(copy, ns=(1, 1))
    load_tokenizer(copy)
    assert len(builds) == 2
    assert len(list(home.iterdir())) == 2


def test_a_folder_is_cached_until_one_of_its_files_changes(home: Path, folder: Path) -> None:
    assert load_tokenizer(folder).encode("ab") == [256]
    assert len(list(home.iterdir())) == 1
    assert load_tokenizer(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("T", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "T"
    assert len(list(home.iterdir())) == 2


def test_an_entry_of_another_shape_is_no_entry(home: Path, folder: Path) -> None:
    cache = DefinitionCache(home)
    load_tokenizer(folder)
    (entry,) = home.iterdir()
    definition = cache.load(entry.stem)
    assert definition is not None
    other = DefinitionCache(home.parent / "other")
    other.store("key", definition.pieces)  # type: ignore[arg-type]
    assert other.load("key") is None


def test_a_cache_that_cannot_be_written_does_not_stop_a_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "file"))
    assert load_tokenizer(folder).encode("ab") == [256]


def test_a_path_that_does_not_exist_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf does not exist"):
        load_tokenizer(tmp_path / "none.gguf")
