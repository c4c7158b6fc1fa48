"""All that makes a tokenizer, as one value that can be stored: the same for a GGUF file and a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tokenmill.core.errors import ModelFileError

TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
)
"""Special tokens by which known model families end an answer, whether or not the file names them as such."""


class SpecialToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that only the prompt format may write. `strip_left`/`strip_right` swallow white space beside it."""

    text: str
    id: int
    strip_left: bool = False
    strip_right: bool = False


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """What `Tokenizer` is made of.

    model: tokenizer.json of the `tokenizers` library, which turns text without special tokens into ids.
    pieces: bytes of every id when it is printed. specials: what `parse_special` looks for.
    hidden: ids that `skip_special` leaves out. eos_id is the one that `add_eos` appends, eos_ids all that end an answer.
    missing_bytes: bytes that no token can spell.
    space_first: encoding puts a space before the start of a text that has none; with `strip_space` decoding takes the
    first space away.
    """

    model: bytes
    pieces: list[bytes]
    specials: list[SpecialToken]
    hidden: list[int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: list[int]
    add_bos: bool
    add_eos: bool
    missing_bytes: bytes
    space_first: bool
    strip_space: bool
    chat_template: str | None


def library_json(model: Mapping[str, Any], *, normalizer: Any, pre_tokenizer: Any, added: Iterable[tuple[int, str]]) -> bytes:
    """A tokenizer.json around a BPE model. `added` are (id, text) that are found in raw text before all else."""
    bpe = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": id, "content": text, **plain} for id, text in added],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": None,
            "decoder": None,
            "model": bpe | dict(model),
        }
    )


def turn_ends(specials: Iterable[SpecialToken], named: Iterable[int]) -> list[int]:
    """The ids that end an answer: those the file names and those known by their text, ascending."""
    return sorted({*named, *(token.id for token in specials if token.text in TURN_ENDS)})


def check_id(value: Any, size: int, where: str) -> int:
    """Return a token id of a model file, or raise `ModelFileError` naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ModelFileError(f"{where} is {value!r}, but must be a token id in [0, {size})")
    return value
