"""Token ids to text, one token at a time."""

from __future__ import annotations

import codecs

from tokenmill.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into text that never ends inside a character.

    What all `push` calls and the final `flush` return is together exactly `Tokenizer.decode` of all ids.
    `continues`: the ids go on from a prompt, so a leading space is theirs and not put there by encoding.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False) -> None:
        self._bytes = tokenizer.token_bytes
        self._skip_special = skip_special
        self._strip = tokenizer.strip_space and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The characters that this token completes; raises `InvalidRequest` for an id outside the vocabulary."""
        data = self._bytes(id, self._skip_special)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
