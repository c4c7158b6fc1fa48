from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill.text.alphabet import BYTE_TO_CHAR
from tokenmill.text.from_gguf import define_from_metadata
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    return lambda model: json.loads((DATA / f"text-{model}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def gemma3() -> Tokenizer:
    return load_tokenizer(resolve("gemma3:270m"))


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., dict[str, Any]]:
    """Metadata: ids 0 to 255 are all bytes, 256 "ab", 257 "abc", 258 <|im_start|>, 259 <|im_end|>, 260 <tool>."""

    def metadata(**changes: Any) -> dict[str, Any]:
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt2",
            "tokenizer.ggml.tokens": [*BYTE_TO_CHAR.values(), "ab", "abc", "<|im_start|>", "<|im_end|>", "<tool>"],
            "tokenizer.ggml.token_type": [1] * 258 + [3, 3, 4],
            "tokenizer.ggml.merges": ["a b", "ab c"],
            "tokenizer.ggml.bos_token_id": 258,
            "tokenizer.ggml.eos_token_id": 259,
        } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}

    return metadata


@pytest.fixture(scope="session")
def sentencepiece() -> Callable[..., dict[str, Any]]:
    """Metadata: ids 0 <unk>, 1 <s>, 2 </s>, 3 to 258 the bytes, then the pieces."""

    def metadata(scores: dict[str, float], **changes: Any) -> dict[str, Any]:
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(scores),
            "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}

    return metadata


@pytest.fixture(scope="session")
def tiny(byte_level: Callable[..., dict[str, Any]]) -> Tokenizer:
    """The tokenizer of the `byte_level` metadata."""
    return Tokenizer(define_from_metadata(byte_level()))
