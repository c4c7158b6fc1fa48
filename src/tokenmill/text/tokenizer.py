"""Text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import tokenizers

from tokenmill.core.errors import InvalidRequest, ModelFileError
from tokenmill.text.alphabet import SPACE
from tokenmill.text.definition import Definition, SpecialToken

_WHITE_SPACE = re.compile(r"\s*")

SHIELD = "\ufdd0"
"""Stands inside the text of a special token to say that it is only text. A noncharacter, so no text contains it."""


class Tokenizer:
    """A model's vocabulary. Immutable; safe to use from several threads at once.

    Special tokens are found here and not in the `tokenizers` library, whose own model does not know them: without
    `parse_special` no text whatever can become one.
    """

    def differs_from(self, other: Tokenizer) -> int | None:
        """The first id that does not print the same in both vocabularies; None if there is none."""
        mine, theirs = self._pieces, other._pieces
        if mine == theirs:
            return None
        return next((id for id, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))

    def __init__(self, definition: Definition) -> None:
        """Raises `ModelFileError` if the library refuses the definition."""
        try:
            self._library = tokenizers.Tokenizer.from_buffer(definition.model)
        except Exception as error:  # the library raises bare `Exception`
            raise ModelFileError(f"the vocabulary cannot be used: {error}") from None
        # A folder's tokenizer.json does list its special tokens; with this the library reads them as plain text.
        self._library.encode_special_tokens = True
        self._pieces = definition.pieces
        self._shown = list(definition.pieces)
        for id in definition.hidden:
            self._shown[id] = b""
        self._hidden = frozenset(definition.hidden)
        self._specials = _SpecialTokens(definition.specials)
        self._missing = re.compile(b"[" + re.escape(definition.missing_bytes) + b"]") if definition.missing_bytes else None
        self._prefix = [definition.bos_id] if definition.add_bos and definition.bos_id is not None else []
        self._suffix = [definition.eos_id] if definition.add_eos and definition.eos_id is not None else []
        self._space_first = definition.space_first
        self.strip_space = definition.strip_space
        self.bos_id = definition.bos_id
        self.eos_id = definition.eos_id
        self.eos_ids = frozenset(definition.eos_ids)
        self.chat_template = definition.chat_template

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def bos_text(self) -> str:
        """How the begin-of-sequence token is written in a prompt; empty without one."""
        return "" if self.bos_id is None else self._pieces[self.bos_id].decode("utf-8", "replace")

    @property
    def eos_text(self) -> str:
        """How the end-of-sequence token is written in a prompt; empty without one."""
        return "" if self.eos_id is None else self._pieces[self.eos_id].decode("utf-8", "replace")

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special puts the begin and end tokens around it that the model was trained with. parse_special reads the
        text of a special token as that token; without it the same text is plain text, as what a user writes must be.
        Raises `InvalidRequest` for a text that is not valid Unicode or that the vocabulary cannot spell.
        """
        self._check(text)
        ids = self._join(self._segments(text) if parse_special else [text])
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def encode_shielded(self, text: str) -> list[int]:
        """Token ids of a prompt that is put together from special tokens and `shield`ed texts; nothing is added."""
        self._check(text.replace(SHIELD, ""))
        return self._join(part.replace(SHIELD, "") if isinstance(part, str) else part for part in self._segments(text))

    def shield(self, text: str) -> str:
        """The same text for `encode_shielded`, with every special token in it marked as plain text.

        Raises `InvalidRequest` if the text contains the mark, U+FDD0, which Unicode keeps out of texts.
        """
        if SHIELD in text:
            raise InvalidRequest("the text contains U+FDD0, which is no character: leave it out")
        parts, end = [], 0
        for start, stop, _ in self._specials.find(text):
            parts += [text[end : start + 1], SHIELD, text[start + 1 : stop]]
            end = stop
        return "".join([*parts, text[end:]])

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises `InvalidRequest` for an id outside the vocabulary.
        """
        data = b"".join([self.token_bytes(id, skip_special) for id in ids])
        if self.strip_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, id: int, skip_special: bool = False) -> bytes:
        """The bytes that a token adds to a text; raises `InvalidRequest` for an id outside the vocabulary."""
        if not 0 <= id < len(self._pieces):
            raise InvalidRequest(f"token id {id} is outside the vocabulary: ids lie in [0, {len(self._pieces)})")
        return self._shown[id] if skip_special else self._pieces[id]

    def is_special(self, id: int) -> bool:
        """Whether the token belongs to the prompt format and not to text."""
        return id in self._hidden

    def _segments(self, text: str) -> Iterator[str | int]:
        """The text cut at its special tokens: plain text as str, special tokens as ids."""
        end = 0
        for start, stop, token in self._specials.find(text):
            before = text[end:start]
            yield before.rstrip() if token.strip_left else before
            yield token.id
            end = stop
            if token.strip_right and (space := _WHITE_SPACE.match(text, stop)):
                end = space.end()
        yield text[end:]

    def _join(self, segments: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        for index, segment in enumerate(segments):
            if isinstance(segment, int):
                ids.append(segment)
            elif segment:
                if self._space_first and index == 0 and not segment.startswith((" ", SPACE)):
                    segment = " " + segment
                # A batch of one: only batches let other threads run meanwhile.
                [encoded] = self._library.encode_batch_fast([segment], add_special_tokens=False)
                ids += encoded.ids
        return ids

    def _check(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
            ) from None
        if self._missing is not None and (match := self._missing.search(data)):
            char = text[len(data[: match.start()].decode("utf-8", "ignore"))]
            raise InvalidRequest(
                f"the model's vocabulary has no token for U+{ord(char):04X} (byte 0x{match[0].hex().upper()}): leave it out"
            )


class _SpecialTokens:
    """Finds the texts of special tokens, the longest first where several begin."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._by_text = {token.text: token for token in tokens}
        self._lengths = sorted({len(text) for text in self._by_text}, reverse=True)
        firsts = "".join(sorted({text[0] for text in self._by_text}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else re.compile(r"(?!)")

    def find(self, text: str) -> Iterator[tuple[int, int, SpecialToken]]:
        """Yield (start, stop, token) left to right without overlap."""
        end = 0
        for candidate in self._first.finditer(text):
            start = candidate.start()
            if start < end:
                continue
            for length in self._lengths:
                token = self._by_text.get(text[start : start + length])
                if token is not None:
                    end = start + len(token.text)
                    yield start, end, token
                    break
