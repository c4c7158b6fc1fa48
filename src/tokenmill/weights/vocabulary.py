"""The tokenizer of a model file or folder."""

from __future__ import annotations

from pathlib import Path

from tokenmill.core.errors import ModelFileError
from tokenmill.text import from_folder
from tokenmill.text.cache import DefinitionCache
from tokenmill.text.definition import Definition
from tokenmill.text.from_gguf import define_from_metadata
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.gguf import GGUFFile
from tokenmill.weights.store import default_home


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a .gguf file or a Hugging Face folder.

    What is derived from the files is kept in `<cache>/tokenizers` and built again when a file has changed or the
    stored copy is damaged. Raises `ModelFileError` if there is no tokenizer or it is not understood.
    """
    path = Path(path)
    if not path.exists():
        raise ModelFileError(f"{path} does not exist: give a .gguf file or a folder with tokenizer.json")
    cache = DefinitionCache(default_home() / "tokenizers")
    files = [file for name in from_folder.FILES if (file := path / name).is_file()] if path.is_dir() else [path]
    key = cache.key(files)
    definition = cache.load(key)
    if definition is None:
        definition = from_folder.define_from_folder(path) if path.is_dir() else _define_from_file(path)
        cache.store(key, definition)
    return Tokenizer(definition)


def _define_from_file(path: Path) -> Definition:
    with GGUFFile.open(path) as file:
        return define_from_metadata(file.metadata)
