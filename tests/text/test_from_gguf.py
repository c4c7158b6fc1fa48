from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.errors import ModelFileError
from tokenmill.text.from_gguf import define_from_metadata
from tokenmill.text.merges import merges_from_scores
from tokenmill.text.pretokenize import PRE_TOKENIZERS
from tokenmill.text.tokenizer import Tokenizer

Metadata = Callable[..., dict[str, Any]]


def words(byte_level: Metadata, pre: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts a text."""
    library = tokenizers.Tokenizer.from_buffer(define_from_metadata(byte_level(pre=pre)).model)
    return [text[start:stop] for _, (start, stop) in library.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt2", ["It", "'s", " 12345", " ok", "!!", "  ", " x", "\n", "\n", "y"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " ok", "!!", "  ", " x", "\n", "\n", "y"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " ok", "!!", "  ", " x", "\n\n", "y"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " ok", "!!", "  ", " x", "\n\n", "y"]),
        ("default", ["It", "'", "s", " ", "123", "45", " ok", "!!", "  ", " x", "\n", "\n", "y"]),
    ],
)
def test_each_pre_tokenizer_cuts_words_its_own_way(byte_level: Metadata, pre: str, expected: list[str]) -> None:
    assert words(byte_level, pre, "It's 12345 ok!!   x\n\ny") == expected


@pytest.mark.parametrize(("pre", "expected"), [("gpt2", ["IT", "'", "S"]), ("qwen2", ["IT", "'S"])])
def test_contractions_in_capitals_are_known_to_the_later_families_only(byte_level: Metadata, pre: str, expected: list[str]) -> None:
    assert words(byte_level, pre, "IT'S") == expected


def test_an_unknown_pre_tokenizer_is_an_error_that_lists_the_known_ones(byte_level: Metadata) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.pre is 'tekken': known .*" + ", ".join(PRE_TOKENIZERS)):
        define_from_metadata(byte_level(pre="tekken"))


def test_llama_3_takes_a_word_of_its_vocabulary_whole_whatever_the_merges(byte_level: Metadata) -> None:
    tokens = byte_level()["tokenizer.ggml.tokens"]
    changed = [*tokens[:257], "xyz", *tokens[258:]]
    assert Tokenizer(define_from_metadata(byte_level(pre="llama-bpe", tokens=changed, merges=["a b"]))).encode("xyz") == [258, 257]
    assert len(Tokenizer(define_from_metadata(byte_level(pre="gpt2", tokens=changed, merges=["a b"]))).encode("xyz")) == 3


def test_the_file_says_which_tokens_go_around_a_text(byte_level: Metadata) -> None:
    both = Tokenizer(define_from_metadata(byte_level(add_bos_token=True, add_eos_token=True)))
    assert both.encode("ab") == [258, 256, 259]
    assert both.encode("ab", add_special=False) == [256]
    assert Tokenizer(define_from_metadata(byte_level())).encode("ab") == [256]


def test_a_turn_token_that_the_file_calls_user_defined_is_special_all_the_same(byte_level: Metadata) -> None:
    tokenizer = Tokenizer(define_from_metadata(byte_level(token_type=[1] * 258 + [4, 4, 4])))
    assert tokenizer.is_special(259)
    assert 259 in tokenizer.eos_ids
    assert not any(tokenizer.is_special(id) for id in tokenizer.encode("<|im_end|><tool>", parse_special=False))


def test_further_end_tokens_come_from_their_keys(byte_level: Metadata) -> None:
    definition = define_from_metadata(byte_level(eot_token_id=7, eom_token_id=8))
    assert definition.eos_ids == [7, 8, 259]
    assert definition.eos_id == 259


def test_unused_tokens_print_nothing_and_are_never_made(byte_level: Metadata) -> None:
    tokenizer = Tokenizer(define_from_metadata(byte_level(token_type=[1] * 258 + [3, 3, 5])))
    assert tokenizer.decode([260, 256]) == "ab"
    assert 260 not in tokenizer.encode("<tool>")


def naive_sentencepiece(scores: dict[str, float], text: str) -> list[str]:
    """Join the neighbours with the best score, leftmost first, until none can be joined."""
    parts = list(text)
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            return parts
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def random_scores(rng: random.Random) -> dict[str, float]:
    pieces = {"".join(rng.choices("ab▁", k=rng.randint(2, 6))) for _ in range(rng.randint(1, 40))}
    ranks = rng.sample(range(1000), len(pieces) + 3)
    return {piece: -float(rank) for piece, rank in zip(["a", "b", "▁", *sorted(pieces)], ranks, strict=True)}


@given(seed=st.integers(0, 2**32))
def test_ranked_merges_give_what_sentencepiece_gives(sentencepiece: Metadata, seed: int) -> None:
    rng = random.Random(seed)
    scores = random_scores(rng)
    tokenizer = Tokenizer(define_from_metadata(sentencepiece(scores, add_space_prefix=False, add_bos_token=False)))
    for _ in range(10):
        text = "".join(rng.choices("ab ", k=rng.randint(1, 30)))
        pieces = [tokenizer.token_bytes(id).decode() for id in tokenizer.encode(text)]
        assert pieces == [piece.replace("▁", " ") for piece in naive_sentencepiece(scores, text.replace(" ", "▁"))], (scores, text)


def test_a_piece_has_one_last_join() -> None:
    scores = {"a": 0.0, "b": 0.0, "ab": -1.0, "ba": -2.0, "aba": -3.0, "bab": -4.0}
    assert merges_from_scores(scores) == [("a", "b"), ("b", "a"), ("ab", "a"), ("b", "ab")]


def test_a_piece_that_joining_never_reaches_has_none() -> None:
    assert merges_from_scores({"a": 0.0, "b": 0.0, "c": 0.0, "ab": -1.0, "bc": -2.0, "abc": -3.0, "aabb": -9.0}) == [
        ("a", "b"), ("b", "c"), ("ab", "c"),
    ]  # fmt: skip


def test_pieces_that_would_take_minutes_are_refused() -> None:
    with pytest.raises(ModelFileError, match="too long: the longest has 20000 characters"):
        merges_from_scores({"a" * 20_000: 0.0})


def test_unknown_characters_fall_back_to_bytes(sentencepiece: Metadata) -> None:
    tokenizer = Tokenizer(define_from_metadata(sentencepiece({"▁": -2.0, "a": -1.0})))
    assert tokenizer.encode("é", add_special=False) == [259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("é")) == "é"


def test_without_byte_tokens_an_unknown_character_is_the_unknown_token(sentencepiece: Metadata) -> None:
    metadata = sentencepiece({"▁": -2.0, "a": -1.0}, add_space_prefix=False)
    for key in ("tokens", "token_type", "scores"):
        del metadata[f"tokenizer.ggml.{key}"][3:259]
    assert Tokenizer(define_from_metadata(metadata)).encode("aéa", add_special=False) == [4, 0, 4]
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(ModelFileError, match="unknown_token_id is not given"):
        define_from_metadata(metadata)


def test_a_space_goes_before_the_text_and_comes_off_again(sentencepiece: Metadata) -> None:
    scores = {"▁": -9.0, "a": -8.0, "▁a": -1.0}
    tokenizer = Tokenizer(define_from_metadata(sentencepiece(scores)))
    assert tokenizer.encode("a") == [1, 261]
    assert tokenizer.decode([1, 261, 261]) == "a a"
    assert Tokenizer(define_from_metadata(sentencepiece(scores, add_space_prefix=False))).encode("a") == [1, 260]


def test_no_text_makes_a_control_or_byte_token_by_its_spelling(sentencepiece: Metadata) -> None:
    scores = {char: -100.0 - ord(char) for char in "<>/s0xA▁"} | {"<s": -1.0, "<0": -2.0, "<0x": -3.0}
    tokenizer = Tokenizer(define_from_metadata(sentencepiece(scores, add_space_prefix=False)))
    ids = tokenizer.encode("<s><0xA0>", add_special=False, parse_special=False)
    assert min(ids) >= 259
    assert tokenizer.decode(ids) == "<s><0xA0>"


def test_numbers_may_come_as_arrays(sentencepiece: Metadata) -> None:
    scores = {"▁": -2.0, "a": -1.0}
    plain = sentencepiece(scores)
    arrays = plain | {
        "tokenizer.ggml.scores": np.array(plain["tokenizer.ggml.scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(plain["tokenizer.ggml.token_type"], np.int32),
    }
    assert define_from_metadata(arrays) == define_from_metadata(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert': known tokenizer models"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing or empty"),
        ({"tokens": ["a", 1]}, r"tokenizer.ggml.tokens\[1\] is a int"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens is missing"),
        ({"token_type": [1]}, "token_type has 1 entries, but tokenizer.ggml.tokens has 261"),
        ({"token_type": [9] * 261}, "token_type holds 9"),
        ({"token_type": [[1]] * 261}, "token_type holds"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab'"),
        ({"merges": ["a zz"]}, r"merges\[0\] is 'a zz'"),
        ({"merges": None}, "merges is missing"),
        ({"bos_token_id": 261}, r"bos_token_id is 261, but must be a token id in \[0, 261\)"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eot_token_id": True}, "eot_token_id is True"),
        ({"add_bos_token": 1}, "add_bos_token is 1, but must be true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token asks for a token"),
        ({"add_eos_token": True, "eos_token_id": None}, "add_eos_token asks for a token"),
        ({"pre": 5}, "pre is 5"),
        ({"pre": ["qwen2"]}, r"pre is \['qwen2'\]"),
        ({"pre": np.array([1])}, r"pre is array"),
    ],
)
def test_damaged_metadata_is_an_error_that_names_the_key(byte_level: Metadata, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        define_from_metadata(byte_level(**changes))


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "x", None])
def test_a_score_that_is_no_number_is_an_error(sentencepiece: Metadata, score: Any) -> None:
    with pytest.raises(ModelFileError, match=r"scores\[259\]"):
        define_from_metadata(sentencepiece({"a": score}))


def test_a_byte_token_that_spells_no_byte_is_an_error(sentencepiece: Metadata) -> None:
    metadata = sentencepiece({"a": -1.0})
    metadata["tokenizer.ggml.tokens"][5] = "<0xZZ>"
    with pytest.raises(ModelFileError, match=r"tokens\[5\] is '<0xZZ>'"):
        define_from_metadata(metadata)


def test_a_chat_template_that_is_no_text_is_an_error(byte_level: Metadata) -> None:
    with pytest.raises(ModelFileError, match="chat_template is a int"):
        define_from_metadata(byte_level() | {"tokenizer.chat_template": 5})
