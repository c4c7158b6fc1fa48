from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.errors import InvalidRequest
from tokenmill.text.detokenizer import Detokenizer
from tokenmill.text.from_gguf import define_from_metadata
from tokenmill.text.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


def reference(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> str:
    """The bytes of all tokens, put together and only then decoded."""
    kept = [tokenizer.token_bytes(id) for id in ids if not (skip_special and tokenizer.is_special(id))]
    return b"".join(kept).decode("utf-8", "replace")


@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=60), skip=st.booleans())
def test_the_pieces_together_are_the_whole_decoded(smollm2: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces = stream(smollm2, ids, skip_special=skip)
    assert "".join(pieces) == reference(smollm2, ids, skip) == smollm2.decode(ids, skip)


@pytest.mark.heavy
@given(ids=st.lists(st.integers(0, 262143) | st.integers(0, 500), max_size=60), skip=st.booleans())
def test_gemmas_pieces_together_are_the_whole_decoded(gemma3: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(gemma3, ids, skip_special=skip)) == reference(gemma3, ids, skip) == gemma3.decode(ids, skip)


def test_half_a_character_is_held_back_until_it_is_whole(tiny: Tokenizer) -> None:
    ids = tiny.encode("🙂a", add_special=False)
    assert stream(tiny, ids) == ["", "", "", "🙂", "a", ""]


def test_a_character_that_never_ends_is_replaced_at_the_end(tiny: Tokenizer) -> None:
    ids = tiny.encode("🙂", add_special=False)
    assert stream(tiny, ids[:3]) == ["", "", "", "\ufffd"]
    assert stream(tiny, [*ids[:3], 256]) == ["", "", "", "\ufffdab", ""]


def test_every_character_comes_with_its_last_token(smollm2: Tokenizer) -> None:
    rng = random.Random(7)
    for _ in range(200):
        text = "".join(chr(rng.randrange(*rng.choice([(32, 127), (0xA0, 0x3000), (0x1F300, 0x1F700)]))) for _ in range(20))
        ids = smollm2.encode(text, add_special=False)
        shown, data = "", b""
        detokenizer = Detokenizer(smollm2)
        for id in ids:
            data += smollm2.token_bytes(id)
            shown += detokenizer.push(id)
            assert shown == data.decode("utf-8", "ignore"), (text, ids)


@pytest.fixture(scope="module")
def llama(sentencepiece: Callable[..., dict[str, Any]]) -> Tokenizer:
    """SentencePiece with a space put before each text."""
    return Tokenizer(define_from_metadata(sentencepiece({"▁": -9.0, "a": -8.0, "▁a": -1.0})))


@given(ids=st.lists(st.integers(0, 261), max_size=20))
def test_the_leading_space_goes_as_in_the_whole(llama: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(llama, ids)) == llama.decode(ids)


def test_a_text_that_goes_on_keeps_its_leading_space(llama: Tokenizer) -> None:
    ids = llama.encode("a a", add_special=False)
    assert llama.decode(ids) == "a a"
    assert stream(llama, ids) == ["a", " a", ""]
    assert stream(llama, ids, continues=True) == [" a", " a", ""]


def test_an_id_outside_the_vocabulary_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        Detokenizer(tiny).push(261)
