from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ConfigError, InvalidRequest
from tokenmill.text.chat import ChatTemplate, encode_chat
from tokenmill.text.templates import BUILT_IN, choose_template
from tokenmill.weights.catalogue import resolve

GOLDEN = Path(__file__).parents[1] / "data" / "chatml.json"


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    found = json.loads(GOLDEN.read_text())
    assert len(found) == 2
    return found


def test_chatml_gives_the_reference_prompts(cases: list[dict[str, Any]]) -> None:
    template = ChatTemplate(choose_template("chatml").source)
    for case in cases:
        assert template.render(case["messages"]) == case["prompt"]
    assert template.render(cases[0]["messages"], add_generation_prompt=False) + "<|im_start|>assistant\n" == cases[0]["prompt"]


def test_a_jinja_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ bos_token }}é{{ messages[0].content }}", encoding="utf-8")
    chosen = choose_template(str(file))
    assert ChatTemplate(chosen.source, "<s>").render([{"role": "user", "content": "x"}]) == "<s>éx"
    assert not chosen.ends


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_what_is_neither_a_name_nor_a_text_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    for choice in (str(file), "", "chatm", "a\0b", str(tmp_path)):
        with pytest.raises(ConfigError, match="neither a built-in template"):
            choose_template(choice)


def test_a_chosen_template_replaces_the_models_own_and_its_end_stops_the_answer(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}")
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with LLM(smollm2_path, max_model_len=64, chat_template=str(file)) as llm:
        [result] = llm.chat([{"role": "user", "content": "The capital of France is"}], greedy)
        assert result.prompt_token_ids == llm.tokenizer.encode("The capital of France is")
        assert result.outputs[0].text.startswith(" Paris")
    with LLM(smollm2_path, max_model_len=64, chat_template="chatml") as llm:
        request, _ = llm._frontend.chat_request([{"role": "user", "content": "Hi"}], SamplingParams(stop=("x",)))
        assert request.params.stop == ("x", "<|im_end|>")


@pytest.mark.heavy
def test_a_base_model_chats_by_explicit_choice_only(cases: list[dict[str, Any]]) -> None:
    path = resolve("gemma3:270m")
    with LLM(path, max_model_len=256) as llm:
        assert not llm.can_chat
        with pytest.raises(InvalidRequest, match="has no chat template") as caught:
            llm.chat(cases[0]["messages"])
        assert caught.value.code == "no_chat_template"
        template = BUILT_IN["chatml"].bind(llm.tokenizer)
        for case in cases:
            expected = llm.tokenizer.encode(case["prompt"])
            assert encode_chat(llm.tokenizer, template, case["messages"]) == expected
            assert expected[0] == llm.tokenizer.bos_id
    with LLM(path, max_model_len=256, chat_template="chatml") as llm:
        assert llm.can_chat
        [result] = llm.chat(cases[0]["messages"], SamplingParams(temperature=0, max_tokens=60))
        assert "<|im_end|>" not in result.outputs[0].text
