"""What a good request gets, whole and in a stream, from a model that answers with what it was told."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
import serving


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "parrot", "messages": [{"role": "user", "content": content}]} | fields


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return serving.events(response)


def parts(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The chunks of one choice."""
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_a_chat_answer_has_text_reason_and_usage(http: httpx.Client) -> None:
    answer = whole(http, CHAT, chat("hello"))
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "parrot"
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "hello", "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    ]
    # Five bytes and the token that ended the answer.
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0},
        "kv": {"format": "bf16", "sparsified_from": None, "dropped_tokens": 0},
    }  # fmt: skip


def test_an_alias_is_answered_under_its_own_name(http: httpx.Client) -> None:
    assert whole(http, CHAT, chat(model="polly"))["model"] == "polly"
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["parrot", "polly"]
    assert http.get("/v1/models/polly").json()["max_model_len"] == 4096


def test_max_tokens_ends_an_answer_by_length(http: httpx.Client) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        choice = whole(http, CHAT, chat("hello", **{name: 3}))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hel", "length")


def test_without_max_tokens_an_answer_may_fill_the_context(http: httpx.Client) -> None:
    usage = whole(http, CHAT, chat("x" * 96, ignore_eos=True))["usage"]
    assert usage["total_tokens"] == 4096


def test_a_stream_has_one_id_one_role_and_one_finish_reason_in_its_last_chunk(http: httpx.Client) -> None:
    chunks = stream(http, CHAT, chat("hello"))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [part["delta"] for part in parts(chunks)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:-1]] == list("hello")
    assert all("role" not in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    assert [part["finish_reason"] for part in parts(chunks)] == [None] * 6 + ["stop"]


def test_a_stream_carries_whole_characters_only(http: httpx.Client) -> None:
    text = "naïve 🙂 日本語"
    pieces = [part["delta"].get("content", "") for part in parts(stream(http, CHAT, chat(text)))]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_that_is_never_completed_becomes_a_replacement_character(http: httpx.Client) -> None:
    chunks = stream(http, CHAT, chat("a🙂", max_tokens=3))
    assert "".join(part["delta"].get("content", "") for part in parts(chunks)) == "a\ufffd"


@pytest.mark.parametrize("stop", ["lo w", ["zzz", "lo w", "o wor"], ["o w", "llo wo"]])
def test_no_part_of_a_stop_string_leaks(http: httpx.Client, stop: str | list[str]) -> None:
    body = chat("hello world", stop=stop)
    expected = "hell" if isinstance(stop, list) and "o w" in stop else "hel"
    choice = whole(http, CHAT, body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    pieces = parts(stream(http, CHAT, body))
    assert "".join(part["delta"].get("content", "") for part in pieces) == expected
    assert pieces[-1]["finish_reason"] == "stop"


def test_text_held_back_for_a_stop_string_that_never_comes_is_delivered(http: httpx.Client) -> None:
    assert whole(http, CHAT, chat("hello wor", stop="world"))["choices"][0]["message"]["content"] == "hello wor"


def test_a_stop_string_may_stay_in_the_text(http: httpx.Client) -> None:
    body = chat("hello world", stop="o w", include_stop_str_in_output=True)
    assert whole(http, CHAT, body)["choices"][0]["message"]["content"] == "hello w"


def test_min_tokens_keeps_a_stop_string_from_ending_an_answer(http: httpx.Client) -> None:
    body = chat("ab ab ab", stop="b", min_tokens=3)
    assert whole(http, CHAT, body)["choices"][0]["message"]["content"] == "ab a"


def test_a_stop_token_ends_an_answer_and_is_not_in_its_text(http: httpx.Client) -> None:
    choice = whole(http, CHAT, chat("hello", stop_token_ids=[ord("l")], return_token_ids=True))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("he", "stop")
    assert choice["token_ids"] == list(b"hel")


def test_a_choice_ended_by_a_stop_string_ends_in_the_engine_too(parrot: serving.Served, http: httpx.Client) -> None:
    whole(http, CHAT, chat("hello world", stop="o w", ignore_eos=True))
    serving.until(lambda: parrot.metric("num_requests_running") == 0, seconds=2)
    assert parrot.metric("kv_cache_usage_perc") == 0


def test_every_choice_of_a_stream_is_a_whole_answer(http: httpx.Client) -> None:
    chunks = stream(http, CHAT, chat("hey", n=3))
    for index in range(3):
        own = parts(chunks, index)
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in own) == "hey"
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == ["stop"]
    assert whole(http, CHAT, chat("hey", n=3))["usage"]["completion_tokens"] == 12


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(http: httpx.Client) -> None:
    chunks = stream(http, CHAT, chat("hey", stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole(http, CHAT, chat("hey"))["usage"]


def test_usage_comes_in_every_chunk_when_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, CHAT, chat("hey", stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 4)


def test_chat_logprobs_have_one_entry_per_token_and_spell_the_text(http: httpx.Client) -> None:
    body = chat("né", logprobs=True, top_logprobs=2, return_token_ids=True)
    choice = whole(http, CHAT, body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == 4
    assert bytes(byte for entry in entries for byte in entry["bytes"] or []).decode() == "né"
    assert [entry["token"] for entry in entries] == ["n", "\\xc3", "\\xa9", "<|eos|>"]
    assert entries[3]["bytes"] is None
    assert [(top["token"], top["logprob"]) for top in entries[0]["top_logprobs"]] == [("n", -0.5), ("o", -1.5)]
    streamed = parts(stream(http, CHAT, body))
    assert [entry for part in streamed if part["logprobs"] for entry in part["logprobs"]["content"]] == entries
    assert [token for part in streamed for token in part.get("token_ids", [])] == choice["token_ids"]


def test_chat_logprobs_without_alternatives(http: httpx.Client) -> None:
    entries = whole(http, CHAT, chat("a", logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[], []]


def test_a_completion_takes_text_ids_and_batches_of_both(http: httpx.Client) -> None:
    prompts = {"ab": ["ab"], (1, 97): ["\x01a"], ("ab", "c"): ["ab", "c"], ((97,), (98, 99)): ["a", "bc"]}
    for prompt, expected in prompts.items():
        given = msgspec.to_builtins(prompt)
        answer = whole(http, TEXT, {"model": "parrot", "prompt": given})
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * len(expected)
        chunks = stream(http, TEXT, {"model": "parrot", "prompt": given})
        for index, text in enumerate(expected):
            assert "".join(part["text"] for part in parts(chunks, index)) == text
            assert [part["finish_reason"] for part in parts(chunks, index)][-1] == "stop"


def test_choices_of_a_batch_are_counted_prompt_by_prompt(http: httpx.Client) -> None:
    answer = whole(http, TEXT, {"model": "parrot", "prompt": ["ab", "c"], "n": 2})
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "c", "c"]
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 0},
        "kv": {"format": "bf16", "sparsified_from": None, "dropped_tokens": 0},
    }  # fmt: skip


def test_completion_logprobs_point_into_the_text(http: httpx.Client) -> None:
    body = {"model": "parrot", "prompt": "xé", "logprobs": 2, "max_tokens": 5}
    answer = whole(http, TEXT, body)["choices"][0]
    logprobs = answer["logprobs"]
    assert answer["text"] == "xé"
    assert logprobs["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", "<|eos|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"x": -0.5, "y": -1.5}
    streamed = [part["logprobs"] for part in parts(stream(http, TEXT, body)) if part["logprobs"]]
    for name, values in logprobs.items():
        assert [value for part in streamed for value in part[name]] == values


@pytest.mark.parametrize("prompt", ["héy", list("héy".encode())])
def test_echo_with_logprobs_has_the_prompt_in_front(http: httpx.Client, prompt: Any) -> None:
    body = {"model": "parrot", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2}
    answer = whole(http, TEXT, body)["choices"][0]
    assert answer["text"] == "héyh\ufffd"
    logprobs = answer["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y", "h", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 5
    assert logprobs["top_logprobs"] == [None] + [{token: -0.5} for token in logprobs["tokens"][1:]]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    chunks = parts(stream(http, TEXT, body))
    assert chunks[0]["text"] == "héy"
    assert [value for part in chunks if part["logprobs"] for value in part["logprobs"]["text_offset"]] == logprobs["text_offset"]


def test_echo_writes_special_tokens_of_the_prompt_out(http: httpx.Client) -> None:
    body = {"model": "parrot", "prompt": "a<|eos|>b", "echo": True, "logprobs": 0, "max_tokens": 1}
    answer = whole(http, TEXT, body)["choices"][0]
    assert answer["text"] == "a<|eos|>ba"
    assert answer["logprobs"]["text_offset"] == [0, 1, 8, 9]


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    text = "añ <|eos|> 🙂"
    answer = whole(http, "/tokenize", {"model": "parrot", "prompt": text})
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096
    assert 256 in answer["tokens"]
    assert whole(http, "/detokenize", {"model": "parrot", "tokens": answer["tokens"]}) == {"prompt": text}


def test_a_message_cannot_write_a_special_token(http: httpx.Client) -> None:
    answer = whole(http, "/tokenize", {"messages": [{"role": "user", "content": "a<|eos|>"}]})
    assert answer["tokens"] == list(b"a<|eos|>")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}])
def test_tokenize_takes_a_prompt_or_messages(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post("/tokenize", json=body).status_code == 400


def test_the_counts_of_the_metrics_are_those_of_the_requests(parrot: serving.Served, http: httpx.Client) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count")
    before = [parrot.metric(name) for name in names]
    whole(http, CHAT, chat("hello", n=2))
    after = [parrot.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 12, 2, 2]
    text = http.get("/metrics").text
    assert 'tokenmill:request_success_total{finished_reason="stop",model_name="parrot"}' in text
    for name in ("num_requests_waiting", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"):
        assert parrot.metric(name) == 0
    assert parrot.metric('kv_cache_frames{engine="mixed-0",model_name="parrot",state="free"}') == 10_000
    assert parrot.metric('kv_cache_pages{engine="mixed-0",model_name="parrot",page_size="8",state="used"}') == 0
    assert parrot.metric('kv_cache_bytes_per_token{engine="mixed-0",format="bf16",model_name="parrot"}') == 1
    for name in ("inter_token_latency_seconds", "request_queue_time_seconds"):
        assert parrot.metric(f"{name}_count") > 0


def test_a_request_that_the_engine_refuses_gets_its_error_as_plain_json() -> None:
    with serving.scripted(script={"refuse": "needs 9 frames of 8"}) as served, served.http() as http:
        for stream_it in (False, True):
            response = http.post(CHAT, json=chat(stream=stream_it))
            assert response.status_code == 400
            assert response.json()["error"] == {
                "message": "needs 9 frames of 8", "type": "invalid_request_error", "param": "max_tokens", "code": "kv_budget_exceeded",
            }  # fmt: skip
