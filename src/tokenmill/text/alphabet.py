"""The two ways in which vocabularies spell bytes: GPT-2's printable alphabet, and SentencePiece's `▁` and `<0xNN>`."""

from __future__ import annotations

import re

SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _printable_alphabet() -> dict[int, str]:
    """Byte -> character: printable Latin-1 stands for itself, the other 68 bytes take U+0100 and up in order."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    return {byte: chr(byte) for byte in kept} | {byte: chr(0x100 + i) for i, byte in enumerate(moved)}


BYTE_TO_CHAR = _printable_alphabet()
_CHAR_TO_BYTE = {ord(char): byte for byte, char in BYTE_TO_CHAR.items()}
_ALPHABET = frozenset(BYTE_TO_CHAR.values())


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a piece in GPT-2's alphabet. A piece with any other character is its own text."""
    if _ALPHABET.issuperset(piece):
        return piece.translate(_CHAR_TO_BYTE).encode("latin-1")
    return piece.encode()


def byte_token_value(piece: str) -> int | None:
    """200 for `<0xC8>`; None for a piece that is no byte token."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return int(match[1], 16) if match else None


def sentencepiece_bytes(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode()
