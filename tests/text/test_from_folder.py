from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tokenmill.core.errors import ModelFileError
from tokenmill.text.alphabet import BYTE_TO_CHAR
from tokenmill.text.from_folder import define_from_folder
from tokenmill.text.tokenizer import Tokenizer

TEXTS = st.lists(st.sampled_from(["<s>", "</s>", "<tool>", "ab", " ", "a", "b", "é", "🙂", "\n"]), max_size=12).map("".join)


def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3 and Qwen have it."""
    vocab = {char: id for id, char in enumerate(BYTE_TO_CHAR.values())} | {"ab": 256, "Ġab": 257}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "ab")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    library.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    return library


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if scheme != "never" else steps)
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return library


def prepend() -> tokenizers.Tokenizer:
    """As older conversions of SentencePiece have it."""
    library = metaspace("always")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.pre_tokenizer = None
    return library


def write(folder: Path, library: tokenizers.Tokenizer, **files: Any) -> Path:
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | files.pop("tokenizer_config", {})
    (folder / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    for name, content in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


LIBRARIES = {
    "byte level": byte_level(),
    "metaspace always": metaspace("always"),
    "metaspace first": metaspace("first"),
    "metaspace never": metaspace("never"),
    "prepend": prepend(),
}


@pytest.fixture(scope="module", params=LIBRARIES.values(), ids=LIBRARIES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    library = request.param
    return library, Tokenizer(define_from_folder(write(tmp_path_factory.mktemp("model"), library)))


@given(text=TEXTS)
def test_ids_are_those_of_the_library_itself(both: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    library, tokenizer = both
    assert tokenizer.encode(text) == library.encode(text).ids
    assert tokenizer.encode(text, add_special=False) == library.encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
def test_text_is_that_of_the_library_itself(both: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    library, tokenizer = both
    ids = library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode(ids, skip_special=False) == library.decode(ids, skip_special_tokens=False)


@given(text=TEXTS)
def test_plain_text_never_becomes_a_special_token(both: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    _, tokenizer = both
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert not any(tokenizer.is_special(id) for id in ids)
    # Metaspace itself cannot tell a leading space from the one that it adds.
    assert tokenizer.decode(ids).lstrip(" ") == text.lstrip(" ")


def test_end_tokens_come_from_every_config(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(), config={"eos_token_id": 256}, generation_config={"eos_token_id": [257, 259]})
    definition = define_from_folder(folder)
    assert definition.eos_ids == [256, 257, 259]
    assert (definition.bos_id, definition.eos_id) == (258, 259)


def test_the_config_may_have_more_rows_than_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer(define_from_folder(write(tmp_path, byte_level(), config={"vocab_size": 300})))
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([299, 256]) == "ab"


def test_settings_decide_about_the_tokens_around_a_text(tmp_path: Path) -> None:
    settings = {"add_bos_token": False, "add_eos_token": True}
    tokenizer = Tokenizer(define_from_folder(write(tmp_path, byte_level(), tokenizer_config=settings)))
    assert tokenizer.encode("ab") == [256, 259]


def test_truncation_and_padding_of_the_file_do_not_touch_a_text(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=50)
    assert len(Tokenizer(define_from_folder(write(tmp_path, library))).encode("a b c d")) == 8


def test_special_tokens_swallow_the_space_that_the_file_says(tmp_path: Path) -> None:
    library = byte_level()
    library.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    tokenizer = Tokenizer(define_from_folder(write(tmp_path, library)))
    assert tokenizer.encode("ab \n<mask> \nab") == library.encode("ab \n<mask> \nab").ids == [258, 256, 261, 256]


def test_the_template_file_comes_before_the_settings(tmp_path: Path) -> None:
    settings = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    folder = write(tmp_path, byte_level(), tokenizer_config=settings)
    assert define_from_folder(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert define_from_folder(folder).chat_template == "J"


def test_a_folder_without_tokenizer_json_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        define_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"bos_token": "<none>"}}, "bos_token is '<none>', which is not in the vocabulary"),
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template is a int"),
        ({"config": {"vocab_size": 10**9}}, "the vocabulary has .* entries and the model 1000000000"),
        ({"config": {"vocab_size": "x"}}, "the model 'x'"),
        ({"config": {"eos_token_id": 10**6}}, "config.json: eos_token_id is 1000000"),
        ({"generation_config": {"eos_token_id": ["x"]}}, "generation_config.json: eos_token_id is 'x'"),
        ({"config": []}, "config.json is not a JSON object"),
    ],
)
def test_a_damaged_folder_is_an_error_that_names_file_and_field(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        define_from_folder(write(tmp_path, byte_level(), **files))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "WordPiece"}}, "model type is 'WordPiece', but only 'BPE'"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}, "cannot be used"),
        ({"model": 5}, "model type is None"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, r"decoder \['WordPiece'\] is not understood"),
    ],
)
def test_a_tokenizer_of_another_kind_is_an_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write(tmp_path, byte_level())
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(whole | change), encoding="utf-8")
    with pytest.raises(ModelFileError, match=message):
        define_from_folder(folder)


def test_a_post_processor_that_adds_something_else_is_an_error(tmp_path: Path) -> None:
    library = byte_level()
    library.post_processor = processors.TemplateProcessing(single="<tool> $A", special_tokens=[("<tool>", 260)])
    with pytest.raises(ModelFileError, match="post_processor adds more"):
        define_from_folder(write(tmp_path, library))


def test_a_file_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level())
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja is not UTF-8"):
        define_from_folder(folder)
