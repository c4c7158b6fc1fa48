"""Every bad request gets the right status and a message that names what is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import serving

from tokenmill.core import errors
from tokenmill.gateway import openapi
from tokenmill.gateway.errors import RESPONSES, error_response

CHAT: dict[str, Any] = {"model": "parrot", "messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"model": "parrot", "prompt": "hello"}


def refused(response: httpx.Response) -> tuple[int, str | None, str | None, str]:
    """(status, code, param, message) of an error answer."""
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["param"], error["message"]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"} | fields]}


CHAT_CASES: list[tuple[dict[str, Any], int, str | None, str | None, str]] = [
    ({"model": "gpt-9"}, 404, "model_not_found", "model", "'parrot'"),
    ({"model": None}, 400, "invalid_type", "model", "expected str, got null"),
    ({"messages": []}, 400, None, "messages", "empty"),
    ({"messages": "hi"}, 400, "invalid_type", "messages", "expected array, got str"),
    ({"messages": [{"role": "user"}]}, 400, None, "messages[0].content", "content"),
    ({"messages": [{"content": "x"}]}, 400, "missing_field", "messages[0].role", "required"),
    (message(role="narrator"), 400, None, "messages[0].role", "narrator"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), 400, "invalid_type", "messages[0].content[0].type", "image_url"),
    (message(role="tool", tool_call_id="a"), 400, "not_built_yet", "messages[0].tool_call_id", "not built yet"),
    (message(role="assistant", tool_calls=[{"id": "a"}]), 400, "not_built_yet", "messages[0].tool_calls", "not built yet"),
    (message(mood="good"), 400, "unknown_field", "messages[0].mood", "not a field"),
    ({"temperature": -1}, 400, None, "temperature", "0 (greedy) or between"),
    ({"temperature": "hot"}, 400, "invalid_type", "temperature", "expected float | null, got str"),
    ({"top_p": 0}, 400, None, "top_p", "above 0"),
    ({"top_k": -2}, 400, None, "top_k", "-2"),
    ({"top_k": 10**30}, 400, None, "top_k", "2**31"),
    ({"min_p": 1.5}, 400, None, "min_p", "between 0 and 1"),
    ({"repetition_penalty": 0}, 400, None, "repetition_penalty", "above 0"),
    ({"presence_penalty": 3}, 400, None, "presence_penalty", "between -2 and 2"),
    ({"n": 0}, 400, None, "n", "between 1 and 128"),
    ({"n": 129}, 400, None, "n", "between 1 and 128"),
    ({"n": True}, 400, "invalid_type", "n", "got bool"),
    ({"seed": 2**70}, 400, None, "seed", "64-bit"),
    ({"seed": 1.5}, 400, "invalid_type", "seed", "got float"),
    ({"max_tokens": 0}, 400, None, "max_tokens", "at least 1"),
    ({"max_tokens": 10**9}, 400, "context_length_exceeded", "messages", "has 5 tokens, model context is 4096 (max_tokens 1000000000)"),
    ({"max_completion_tokens": 4092}, 400, "context_length_exceeded", "messages", "(max_tokens 4092)"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, None, "max_completion_tokens", "send one of them"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, None, "min_tokens", "at most max_tokens (8)"),
    ({"min_tokens": 4092}, 400, None, "min_tokens", "at most max_tokens (4091)"),
    ({"stop": ""}, 400, None, "stop", "non-empty"),
    ({"stop": ["x"] * 17}, 400, None, "stop", "at most 16"),
    ({"stop": ["x" * 2048] * 3}, 400, None, "stop", "at most 4096 characters"),
    ({"stop": [1]}, 400, "invalid_type", "stop[0]", "got int"),
    ({"stop_token_ids": [257]}, 400, None, "stop_token_ids", "[0, 257)"),
    ({"logit_bias": {"257": 1}}, 400, None, "logit_bias", "[0, 257)"),
    ({"logit_bias": {"a": 1}}, 400, "invalid_type", "logit_bias", "expected int"),
    ({"logit_bias": {"1": 101}}, 400, None, "logit_bias", "between -100 and 100"),
    ({"top_logprobs": 2}, 400, None, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, None, "top_logprobs", "between 0 and 20"),
    ({"logprobs": 5}, 400, "invalid_type", "logprobs", "expected bool"),
    ({"stream": "yes"}, 400, "invalid_type", "stream", "expected bool"),
    ({"stream_options": {"include_usage": True}}, 400, None, "stream_options", "stream true"),
    ({"stream": True, "stream_options": {"usage": True}}, 400, "unknown_field", "stream_options.usage", "not a field"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        400, None, "stream_options.continuous_usage_stats", "include_usage",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400, "unsupported_field", "stream_options.include_obfuscation", "send false",
    ),
    ({"priority": 3}, 400, None, "priority", "0 (VIP)"),
    ({"prompt_cache_key": ""}, 400, None, "prompt_cache_key", "has 0 characters, but must have 1 to 256"),
    ({"prompt_cache_key": "k" * 257}, 400, None, "prompt_cache_key", "has 257 characters"),
    ({"prompt_cache_key": 7}, 400, "invalid_type", "prompt_cache_key", "got int"),
    ({"temprature": 1}, 400, "unknown_field", "temprature", "did you mean 'temperature'?"),
    ({"quux": 1}, 400, "unknown_field", "quux", "leave it out"),
    ({"kv_budget_mb": 0}, 400, None, "kv_budget_mb", "above 0"),
    ({"kv_budget_mb": "all"}, 400, "invalid_type", "kv_budget_mb", "got str"),
    ({"structured_outputs": {"regex": "a"}}, 400, "not_built_yet", "structured_outputs", "not built yet"),
    ({"response_format": {"type": "json_object"}}, 400, "not_built_yet", "response_format", "not built yet"),
    ({"tools": [{"type": "function"}]}, 400, "not_built_yet", "tools", "not built yet"),
    ({"tool_choice": "required"}, 400, "not_built_yet", "tool_choice", "not built yet"),
    ({"functions": [{"name": "f"}]}, 400, "not_built_yet", "functions", "not built yet"),
    ({"store": True}, 400, "unsupported_field", "store", "send false"),
    ({"modalities": ["text", "audio"]}, 400, "unsupported_field", "modalities", '["text"]'),
    ({"reasoning_effort": "high"}, 400, "unsupported_field", "reasoning_effort", "none"),
    ({"service_tier": "flex"}, 400, "unsupported_field", "service_tier", '"auto" or "default"'),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "code", "param", "words"), CHAT_CASES, ids=lambda value: str(value)[:60])
def test_a_bad_chat_request_is_refused_by_name(
    http: httpx.Client, change: dict[str, Any], status: int, code: str | None, param: str, words: str
) -> None:
    got = refused(http.post("/v1/chat/completions", json=CHAT | change))
    assert got[:3] == (status, code, param)
    assert words in got[3]


def nested(depth: int) -> list[Any]:
    """A list `depth` lists deep."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [300, 600, 900])
def test_deep_tools_are_the_requests_error(http: httpx.Client, depth: int) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"enum": nested(depth)}}}]
    response = http.post("/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": "none"})
    if response.status_code != 200:
        assert refused(response)[0] == 400


def test_a_refusal_is_short_however_long_the_value(http: httpx.Client) -> None:
    for field in ({"stop": ["x"] * 100_000}, {"stop_token_ids": [257] * 100_000}, {"logit_bias": {str(i): 200 for i in range(200)}}):
        assert len(http.post("/v1/chat/completions", json=CHAT | field).content) < 1000


TEXT_CASES: list[tuple[dict[str, Any], str | None, str, str]] = [
    ({"prompt": []}, None, "prompt", "empty list"),
    ({"prompt": ""}, None, "prompt", "no tokens"),
    ({"prompt": [[]]}, None, "prompt", "no tokens"),
    ({"prompt": None}, "invalid_type", "prompt", "got null"),
    ({"prompt": [1, 257]}, None, "prompt", "prompt[1] is token id 257, but the vocabulary has the ids 0 to 256"),
    ({"prompt": [[5], [-1]]}, None, "prompt[1]", "prompt[1][0] is token id -1"),
    ({"prompt": [1, "a"]}, None, "prompt", "mixes kinds"),
    ({"prompt": [1, True]}, "invalid_type", "prompt[1]", "got bool"),
    ({"prompt": ["a"] * 2049}, None, "prompt", "2049"),
    ({"prompt": ["a"] * 17, "n": 128}, None, "n", "17 prompts with n 128 are 2176 choices, but 2048 are the limit"),
    ({"prompt": [10**30]}, None, "prompt", "token id 1000000"),
    ({"prompt": "a" * 4096}, "context_length_exceeded", "prompt", "prompt has 4096 tokens, model context is 4096"),
    ({"logprobs": 21}, None, "logprobs", "between 0 and 20"),
    ({"logprobs": True}, "invalid_type", "logprobs", "got bool"),
    ({"best_of": 2}, "unsupported_field", "best_of", "send 1"),
    ({"best_of": True}, "unsupported_field", "best_of", "send 1"),
    ({"suffix": "x"}, "unsupported_field", "suffix", "leave it out"),
    ({"messages": []}, "unknown_field", "messages", "not a field"),
]


@pytest.mark.parametrize(("change", "code", "param", "words"), TEXT_CASES, ids=lambda value: str(value)[:60])
def test_a_bad_text_request_is_refused_by_name(
    http: httpx.Client, change: dict[str, Any], code: str | None, param: str, words: str
) -> None:
    got = refused(http.post("/v1/completions", json=TEXT | change))
    assert got[:3] == (400, code, param)
    assert words in got[3]


NEUTRAL = [
    dict.fromkeys(("temperature", "top_p", "n", "stop", "stream", "seed", "max_tokens", "logit_bias", "tools", "user")),
    {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "store": False, "metadata": {}, "service_tier": "auto"},
    {"modalities": ["text"], "response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"priority": 0, "cache_salt": "tenant", "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": -100}},
    {"stream_options": None, "reasoning_effort": "none", "verbosity": "medium", "function_call": "none", "functions": []},
    message(role="developer"),
    message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    message(role="assistant", refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None, name="n"),
]


@pytest.mark.parametrize("change", NEUTRAL, ids=lambda value: str(value)[:60])
def test_what_asks_for_nothing_unusual_is_taken(http: httpx.Client, change: dict[str, Any]) -> None:
    assert http.post("/v1/chat/completions", json=CHAT | change).status_code == 200


JSON = {"content-type": "application/json"}

RAW_CASES: list[tuple[str, bytes, dict[str, str], int, str, str]] = [
    ("empty", b"", JSON, 400, "invalid_json", "empty"),
    ("cut", b'{"model": "parrot"', JSON, 400, "invalid_json", "truncated"),
    ("not an object", b"[]", JSON, 400, "invalid_type", "the body: expected object"),
    ("invalid UTF-8", b'{"model": "\xff\xfe"}', JSON, 400, "invalid_json", "UTF-8"),
    ("lone surrogate", b'{"model": "\\ud800 and more text"}', JSON, 400, "invalid_json", "surrogate"),
    ("NaN", b'{"model": "parrot", "temperature": NaN}', JSON, 400, "invalid_json", "invalid character"),
    ("nested", b'{"model": "parrot", "tools": [{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", JSON, 400, "invalid_json", "nested"),
    ("form", b"{}", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type", "Content-Type: application/json"),
    ("gzip", b"{}", JSON | {"content-encoding": "gzip"}, 415, "unsupported_media_type", "gzip"),
]


@pytest.mark.parametrize("case", RAW_CASES, ids=lambda case: case[0])
def test_a_body_that_is_not_the_right_json_is_refused(http: httpx.Client, case: tuple[str, bytes, dict[str, str], int, str, str]) -> None:
    _, body, headers, status, code, words = case
    got = refused(http.post("/v1/chat/completions", content=body, headers=headers))
    assert got[:2] == (status, code)
    assert words in got[3]


def test_json_without_a_content_type_is_taken(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", content=msgspec.json.encode(CHAT))
    assert "content-type" not in response.request.headers
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "in chunks"])
def test_a_body_of_40_mb_is_refused_and_the_connection_stays_good(http: httpx.Client, chunked: bool) -> None:
    def chunks() -> Iterator[bytes]:
        yield from itertools.repeat(b"x" * 2**20, 40)

    content = chunks() if chunked else b"x" * (40 * 2**20)
    got = refused(http.post("/v1/chat/completions", content=content, headers=JSON))
    assert got[:2] == (413, "body_too_large")
    assert "8388608 bytes" in got[3]
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_unknown_routes_and_methods_are_told(http: httpx.Client) -> None:
    assert refused(http.get("/v1/nothing"))[:2] == (404, "not_found")
    assert refused(http.get("/health/"))[:2] == (404, "not_found")
    wrong = http.get("/v1/chat/completions")
    assert refused(wrong)[:2] == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert refused(http.get("/v1/models/gpt-9"))[:3] == (404, "model_not_found", "model")


@pytest.mark.parametrize("value", ["", "has space", "x" * 129, "ümlaut"])
def test_a_request_id_that_cannot_be_echoed_is_refused(http: httpx.Client, value: str) -> None:
    response = http.get("/health", headers={b"x-request-id": value.encode()})  # type: ignore[dict-item]
    assert refused(response)[:3] == (400, None, "X-Request-Id")


def test_a_request_id_is_echoed_or_made_on_every_answer(http: httpx.Client) -> None:
    sent = {"x-request-id": "abc-123/x:y"}
    for response in (
        http.get("/health", headers=sent),
        http.get("/nowhere", headers=sent),
        http.post("/v1/chat/completions", json=CHAT, headers=sent),
        http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=sent),
    ):
        assert response.headers.get_list("x-request-id") == ["abc-123/x:y"]
    made = [http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]


def test_with_a_key_only_probes_and_metrics_are_open() -> None:
    with serving.scripted(api_key="sesam") as served, served.http() as http:
        for path in ("/health", "/ready", "/metrics"):
            assert http.get(path).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesam"}, {"authorization": "Bearer sesam2"}):
            for path in ("/v1/models", "/openapi.json", "/nowhere"):
                response = http.get(path, headers=headers)
                assert refused(response)[:2] == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        assert http.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer sesam"}).status_code == 200


def test_a_model_without_a_chat_template_says_so() -> None:
    with serving.scripted(chat_template=None) as served, served.http() as http:
        got = refused(http.post("/v1/chat/completions", json=CHAT))
        assert got[:2] == (400, "no_chat_template")
        assert "/v1/completions" in got[3]
        assert http.post("/v1/completions", json=TEXT).status_code == 200


def tree(kind: type[errors.TokenmillError]) -> list[type[errors.TokenmillError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


@pytest.mark.parametrize("kind", tree(errors.TokenmillError))
def test_every_error_of_the_tree_is_mapped_and_documented(kind: type[errors.TokenmillError]) -> None:
    response = error_response(kind("what was wrong", param="field"))
    body = msgspec.json.decode(response.body)
    assert body == {"error": {"message": "what was wrong", "type": kind.type, "param": "field", "code": kind.code}}
    assert response.status_code in RESPONSES
    documented = msgspec.json.decode(openapi.openapi_json())["components"]["responses"]
    assert str(response.status_code) in documented
    assert kind.status != 422


def test_a_conversation_of_too_many_messages_is_refused(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x"}] * 4097
    got = refused(http.post("/v1/chat/completions", json={"model": "parrot", "messages": messages}))
    assert got[0] == 400
    assert "4096" in got[3]
    assert got[2] == "messages"
