"""A tokenizer definition from the files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from tokenmill.core.errors import ModelFileError
from tokenmill.text.alphabet import BYTE_TO_CHAR, byte_level_bytes, byte_token_value, sentencepiece_bytes
from tokenmill.text.definition import TURN_ENDS, Definition, SpecialToken, check_id, turn_ends

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
"""Every file that a definition depends on; only the first must exist."""

_LARGEST_FILE = 1 << 28
_LARGEST_VOCABULARY = 1 << 22
_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def define_from_folder(folder: Path) -> Definition:
    """Build a definition; raises `ModelFileError` naming the file and the field that is missing or not understood."""
    return _Folder(folder).define()


class _Folder:
    """The folder's files, with every value checked before use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "tokenizer.json"
        if not self._file.is_file():
            raise ModelFileError(f"{folder} has no tokenizer.json: without it there is no way from text to token ids")
        self._json = self._read("tokenizer.json")
        self._settings = self._read("tokenizer_config.json")
        self._config = self._read("config.json")
        self._generation = self._read("generation_config.json")
        self._library = self._load()
        self._ids: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self._size = self._vocab_size()
        self._bos = self._token("bos_token")
        self._eos = self._token("eos_token")
        self._specials = self._special_tokens()

    def define(self) -> Definition:
        add_bos, add_eos = self._added_around()
        decoders = list(_steps(self._json.get("decoder"), "decoders"))
        byte_level = any(step["type"] == "ByteLevel" for step in decoders)
        if not byte_level and not _SENTENCEPIECE_DECODERS.issuperset(step["type"] for step in decoders):
            unknown = [step["type"] for step in decoders]
            raise ModelFileError(f"{self._file}: decoder {unknown} is not understood: known are ByteLevel and SentencePiece's own")
        strips = any((step["type"] == "Strip" and step.get("start") == 1) or _prefixes(step) != "never" for step in decoders)
        space_first = self._take_over_first_space()
        return Definition(
            model=self._library_json(),
            pieces=self._pieces(byte_level_bytes if byte_level else _sentencepiece_bytes),
            specials=self._specials,
            hidden=[token.id for token in self._specials],
            bos_id=self._bos,
            eos_id=self._eos,
            eos_ids=turn_ends(self._specials, self._named_eos()),
            add_bos=add_bos,
            add_eos=add_eos,
            missing_bytes=bytes(byte for byte, char in BYTE_TO_CHAR.items() if char not in self._ids) if byte_level else b"",
            space_first=space_first,
            strip_space=strips,
            chat_template=self._template(),
        )

    def _load(self) -> tokenizers.Tokenizer:
        model = self._json.get("model")
        kind = model.get("type", "BPE") if isinstance(model, dict) else None
        if kind != "BPE":
            raise ModelFileError(f"{self._file}: model type is {kind!r}, but only 'BPE' is known")
        # Padding and truncation are for training; either would change what a prompt says.
        self._json["truncation"] = self._json["padding"] = None
        try:
            return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(self._json))
        except Exception as error:  # the library raises bare `Exception`
            raise ModelFileError(f"{self._file} cannot be used: {error}") from None

    def _vocab_size(self) -> int:
        """The model's own count, where it is larger: rows of the output layer beyond the vocabulary have no text."""
        text = self._config.get("text_config")
        nested = text.get("vocab_size", 0) if isinstance(text, dict) else 0
        rows = self._config.get("vocab_size", nested)
        entries = max(self._ids.values(), default=-1) + 1
        if not isinstance(rows, int) or not 0 < max(rows, entries) <= _LARGEST_VOCABULARY:
            raise ModelFileError(
                f"{self._folder}: the vocabulary has {entries} entries and the model {rows!r}, but 1 to {_LARGEST_VOCABULARY} are possible"
            )
        return max(rows, entries)

    def _token(self, name: str) -> int | None:
        value = self._settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            id = None if name in self._settings else self._config.get(name + "_id")
            return id if isinstance(id, int) and 0 <= id < self._size else None
        if text not in self._ids:
            raise ModelFileError(f"{self._folder}/tokenizer_config.json: {name} is {text!r}, which is not in the vocabulary")
        return self._ids[text]

    def _special_tokens(self) -> list[SpecialToken]:
        """Those the file marks as special, and those that begin, end or turn a text whether it marks them or not."""
        return [
            SpecialToken(token.content, id, token.lstrip, token.rstrip)
            for id, token in sorted(self._library.get_added_tokens_decoder().items())
            if token.content and (token.special or token.content in TURN_ENDS or id in (self._bos, self._eos))
        ]

    def _named_eos(self) -> Iterator[int]:
        if self._eos is not None:
            yield self._eos
        for config, name in ((self._config, "config.json"), (self._generation, "generation_config.json")):
            ids = config.get("eos_token_id")
            for id in ids if isinstance(ids, list) else [] if ids is None else [ids]:
                yield check_id(id, self._size, f"{self._folder}/{name}: eos_token_id")

    def _added_around(self) -> tuple[bool, bool]:
        """Whether the begin and the end token are put around a text."""
        bare = self._library.encode("a", add_special_tokens=False).ids
        whole = self._library.encode("a", add_special_tokens=True).ids
        bos = whole[:1] == [self._bos] and bare[:1] != [self._bos]
        eos = whole[-1:] == [self._eos] and bare[-1:] != [self._eos]
        if whole != [self._bos] * bos + bare + [self._eos] * eos:
            raise ModelFileError(f"{self._file}: post_processor adds more than the begin and end token: a text becomes {whole}")
        add_bos, add_eos = self._settings.get("add_bos_token"), self._settings.get("add_eos_token")
        return (
            self._bos is not None and bool(bos if add_bos is None else add_bos),
            self._eos is not None and bool(eos if add_eos is None else add_eos),
        )

    def _take_over_first_space(self) -> bool:
        """Whether the start of a text, and only that, gets a space.

        The library would see every stretch between two special tokens as a text of its own, so `Tokenizer` does it.
        """
        found = False
        for step in _steps(self._json.get("pre_tokenizer"), "pretokenizers"):
            if _prefixes(step) == "first":
                step["prepend_scheme"] = "never"
                found = True
        return found

    def _library_json(self) -> bytes:
        special = {token.id for token in self._specials}
        for token in self._json.get("added_tokens") or []:
            token["special"] = token["id"] in special
        return msgspec.json.encode(self._json)

    def _pieces(self, to_bytes: Callable[[str], bytes]) -> list[bytes]:
        pieces = [b""] * self._size
        for text, id in self._library.get_vocab(with_added_tokens=False).items():
            pieces[id] = to_bytes(text)
        for id, token in self._library.get_added_tokens_decoder().items():
            pieces[id] = token.content.encode() if to_bytes is byte_level_bytes else sentencepiece_bytes(token.content)
        return pieces

    def _template(self) -> str | None:
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return self._text(file)
        template = self._settings.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise ModelFileError(f"{self._folder}/tokenizer_config.json: chat_template is a {type(template).__name__}, but must be text")
        return template

    def _read(self, name: str) -> dict[str, Any]:
        """A JSON object; empty for a file that does not exist."""
        file = self._folder / name
        if not file.is_file():
            return {}
        try:
            return msgspec.json.decode(self._text(file), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelFileError(f"{file} is not a JSON object: {error}") from None

    def _text(self, file: Path) -> str:
        size = file.stat().st_size
        if size > _LARGEST_FILE:
            raise ModelFileError(f"{file} has {size} bytes, but at most {_LARGEST_FILE} are read")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{file} is not UTF-8: {error}") from None


def _steps(component: Any, children: str) -> Iterator[dict[str, Any]]:
    """The parts of a component in tokenizer.json, the members of a sequence one by one."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for child in component[children]:
            yield from _steps(child, children)
    else:
        yield component


def _prefixes(step: dict[str, Any]) -> str:
    """Where a step puts a space in front: `always`, `first` or `never`."""
    if step["type"] != "Metaspace":
        return "never"
    return step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")


def _sentencepiece_bytes(piece: str) -> bytes:
    value = byte_token_value(piece)
    return sentencepiece_bytes(piece) if value is None else bytes([value])
