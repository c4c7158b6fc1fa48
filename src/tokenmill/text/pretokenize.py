"""How text is cut into words before byte-level BPE merges them, by the name a GGUF file gives in `tokenizer.ggml.pre`."""

from __future__ import annotations

import msgspec

_CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """The family of Llama 3 and Qwen 2: they differ only in how many digits make a word."""
    return rf"(?i:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(msgspec.Struct, frozen=True):
    """`splits` apply one after the other, each to the words the one before left; every match becomes a word of its own.

    `ignore_merges`: a word that is a vocabulary entry is taken whole, whatever the merges say. `add_bos` is what holds
    when the file does not say.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # What readers of GGUF agree on for files older than the key.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt2": PreTokenizer((_GPT2,)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2": PreTokenizer((_cl100k(r"\p{N}"),)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
}
