"""A tokenizer definition from the `tokenizer.*` metadata of a GGUF file."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.core.errors import ModelFileError
from tokenmill.text.alphabet import BYTE_TO_CHAR, SPACE, byte_level_bytes, byte_token_value, sentencepiece_bytes
from tokenmill.text.definition import TURN_ENDS, Definition, SpecialToken, check_id, library_json, turn_ends
from tokenmill.text.merges import merges_from_scores
from tokenmill.text.pretokenize import PRE_TOKENIZERS, PreTokenizer

_KEY = "tokenizer.ggml."
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class _Type(enum.IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def define_from_metadata(metadata: Mapping[str, Any]) -> Definition:
    """Build a definition; raises `ModelFileError` naming the metadata key that is missing, damaged or unknown."""
    return _Reader(metadata).define()


class _Reader:
    """The metadata with every value checked before use."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens = self._strings("tokens")
        self.types = self._types()
        self.bos_id = self._id("bos_token_id")
        self.named_eos = [id for key in _EOS_KEYS if (id := self._id(key)) is not None]
        self._promote_turn_tokens()
        self.specials = [
            SpecialToken(text, id)
            for id, (text, type) in enumerate(zip(self.tokens, self.types, strict=True))
            if type in (_Type.CONTROL, _Type.UNKNOWN) and text
        ]

    def define(self) -> Definition:
        kind = self._value("model", str)
        if kind == "gpt2":
            return self._byte_level()
        if kind == "llama":
            return self._sentencepiece()
        raise ModelFileError(f"{_KEY}model is {kind!r}: known tokenizer models are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)")

    def _byte_level(self) -> Definition:
        pre = self._pre_tokenizer()
        vocab = {text: id for id, text in self._of(_Type.NORMAL, _Type.USER_DEFINED)}
        splits = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in pre.splits]
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        model = library_json(
            {"vocab": vocab, "merges": self._merges(vocab), "ignore_merges": pre.ignore_merges},
            normalizer=None,
            pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
            added=self._of(_Type.USER_DEFINED),
        )
        missing = bytes(byte for byte, char in BYTE_TO_CHAR.items() if char not in vocab)
        raw = (_Type.CONTROL, _Type.UNKNOWN, _Type.USER_DEFINED)
        pieces = [
            text.encode() if type in raw else b"" if type == _Type.UNUSED else byte_level_bytes(text)
            for text, type in zip(self.tokens, self.types, strict=True)
        ]
        return self._definition(model, pieces, add_bos=pre.add_bos, missing=missing, strip_space=False)

    def _sentencepiece(self) -> Definition:
        vocab = {text: id for id, text in self._of(_Type.NORMAL, _Type.USER_DEFINED, _Type.BYTE)}
        covered = {byte_token_value(text) for _, text in self._of(_Type.BYTE)}
        model: dict[str, Any] = {"vocab": vocab, "merges": merges_from_scores(self._scores())}
        if covered.issuperset(range(256)):
            model["byte_fallback"] = True
        else:
            unknown = self._id("unknown_token_id")
            if unknown is None:
                raise ModelFileError(
                    f"{_KEY}tokens lacks some of <0x00> to <0xFF>, and {_KEY}unknown_token_id is not given: some text would have no ids"
                )
            vocab[self.tokens[unknown]] = unknown
            model |= {"unk_token": self.tokens[unknown], "fuse_unk": True}
        prefix = self._flag("add_space_prefix", default=True)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        steps = [{"type": "Prepend", "prepend": SPACE}, spaces] if prefix else [spaces]
        library = library_json(
            model,
            normalizer={"type": "Sequence", "normalizers": steps},
            pre_tokenizer=None,
            added=self._of(_Type.USER_DEFINED),
        )
        pieces = [self._sentencepiece_piece(id) for id in range(len(self.tokens))]
        return self._definition(library, pieces, add_bos=True, missing=b"", strip_space=prefix)

    def _sentencepiece_piece(self, id: int) -> bytes:
        text, type = self.tokens[id], self.types[id]
        if type == _Type.UNUSED:
            return b""
        if type == _Type.BYTE:
            value = byte_token_value(text)
            if value is None:
                raise ModelFileError(f"{_KEY}tokens[{id}] is {text!r}, but a byte token must read <0x00> to <0xFF>")
            return bytes([value])
        return sentencepiece_bytes(text)

    def _definition(self, model: bytes, pieces: list[bytes], *, add_bos: bool, missing: bytes, strip_space: bool) -> Definition:
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ModelFileError(f"tokenizer.chat_template is a {type(template).__name__}, but must be text")
        add_bos = self._flag("add_bos_token", default=add_bos)
        add_eos = self._flag("add_eos_token", default=False)
        if add_bos and self.bos_id is None:
            raise ModelFileError(f"{_KEY}add_bos_token asks for a token that {_KEY}bos_token_id does not give")
        if add_eos and self._id("eos_token_id") is None:
            raise ModelFileError(f"{_KEY}add_eos_token asks for a token that {_KEY}eos_token_id does not give")
        eos = turn_ends(self.specials, self.named_eos)
        return Definition(
            model=model,
            pieces=pieces,
            specials=self.specials,
            hidden=[token.id for token in self.specials],
            bos_id=self.bos_id,
            eos_id=self._id("eos_token_id"),
            eos_ids=eos,
            add_bos=add_bos,
            add_eos=add_eos,
            missing_bytes=missing,
            space_first=False,
            strip_space=strip_space,
            chat_template=template,
        )

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._metadata.get(_KEY + "pre", "default")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise ModelFileError(f"{_KEY}pre is {name!r}: known pre-tokenizers are {', '.join(PRE_TOKENIZERS)}")
        return PRE_TOKENIZERS[name]

    def _promote_turn_tokens(self) -> None:
        """Some converters mark the tokens that end a turn as user-defined, which would let any text write them."""
        named = {self.bos_id, *self.named_eos}
        for id, (text, type) in enumerate(zip(self.tokens, self.types, strict=True)):
            if type == _Type.USER_DEFINED and (id in named or text in TURN_ENDS):
                self.types[id] = _Type.CONTROL

    def _of(self, *types: _Type) -> list[tuple[int, str]]:
        return [(id, text) for id, (text, type) in enumerate(zip(self.tokens, self.types, strict=True)) if type in types and text]

    def _merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        merges = []
        for index, merge in enumerate(self._strings("merges")):
            # The left part may itself be a space in vocabularies that do not spell bytes.
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or not (left in vocab and right in vocab and left + right in vocab):
                raise ModelFileError(f"{_KEY}merges[{index}] is {merge!r}, but must be two tokens whose join is a token")
            merges.append((left, right))
        return merges

    def _scores(self) -> dict[str, float]:
        values = self._array("scores")
        scores = {}
        for id, (text, type) in enumerate(zip(self.tokens, self.types, strict=True)):
            if type == _Type.NORMAL and text:
                score = values[id]
                if not isinstance(score, (int, float)) or not math.isfinite(score):
                    raise ModelFileError(f"{_KEY}scores[{id}] is {score!r}, but must be a finite number")
                scores[text] = float(score)
        return scores

    def _types(self) -> list[_Type]:
        if _KEY + "token_type" not in self._metadata:
            return [_Type.NORMAL] * len(self.tokens)
        known = {int(type): type for type in _Type}
        try:
            return [known[value] for value in self._array("token_type")]
        except (KeyError, TypeError) as error:
            raise ModelFileError(f"{_KEY}token_type holds {error}, but must hold numbers from 1 to 6") from None

    def _array(self, key: str) -> Sequence[Any]:
        """One value per token."""
        values = self._list(key)
        if len(values) != len(self.tokens):
            raise ModelFileError(f"{_KEY}{key} has {len(values)} entries, but {_KEY}tokens has {len(self.tokens)}")
        return values

    def _strings(self, key: str) -> list[str]:
        values = self._list(key)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise ModelFileError(f"{_KEY}{key}[{index}] is a {type(value).__name__}, but must be text")
        return values

    def _list(self, key: str) -> list[Any]:
        value = self._metadata.get(_KEY + key)
        if value is not None and hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, list) or not value:
            raise ModelFileError(f"{_KEY}{key} is missing or empty: the file carries no usable vocabulary")
        return value

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(_KEY + key)
        return None if value is None else check_id(value, len(self.tokens), _KEY + key)

    def _flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise ModelFileError(f"{_KEY}{key} is {value!r}, but must be true or false")
        return value

    def _value(self, key: str, kind: type) -> Any:
        value = self._metadata.get(_KEY + key)
        if not isinstance(value, kind):
            raise ModelFileError(f"{_KEY}{key} is {value!r}, but must be given as {kind.__name__}")
        return value
