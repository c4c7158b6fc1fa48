"""What clients send. Types are strict: a wrong one is a 400 that names the field.

Fields that OpenAI documents but that cannot be served are known by name, so that a client which sends their neutral
value works and one which means them is told.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest, NotBuiltYet

NeutralOnly = Annotated[Any, Meta(description="Accepted with its neutral value only; anything else is refused.")]
NotBuilt = Annotated[Any, Meta(description="Not built yet: refused unless null.")]
NoEffect = Annotated[str | None, Meta(description="Accepted; it has no effect on the answer.")]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Usage so far in every chunk; needs include_usage.")] = None
    include_obfuscation: NeutralOnly = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and text completions share. Null is the default everywhere."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Meta(description="Choices per prompt, at most 128.")] = None
    max_tokens: Annotated[int | None, Meta(description="Default: as much as the context allows.")] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy. Default 1.")] = None
    top_p: float | None = None
    top_k: Annotated[int | None, Meta(description="0 or -1: off.")] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, Meta(description="Token id to a bias from -100 to 100.")] = None
    seed: Annotated[int | None, Meta(description="One seed, one answer. Drawn when null.")] = None
    stop: Annotated[str | list[str] | None, Meta(description="At most 16 strings; none of them appears in the text.")] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: Annotated[bool | None, Meta(description="Adds token_ids to each choice.")] = None
    priority: Annotated[int | None, Meta(description="0 VIP, 1 normal (the default), 2 background.")] = None
    cache_salt: Annotated[str | None, Meta(description="Prompts share cached prefixes only with the same salt.")] = None
    prompt_cache_key: Annotated[
        str | None, Meta(description="Requests with the same one go to the same worker, if it can take them; at most 256 characters.")
    ] = None
    kv_budget_mb: Annotated[float | None, Meta(description="MiB that the keys and values of each choice may take.")] = None
    structured_outputs: NotBuilt = None
    response_format: NeutralOnly = None
    user: NoEffect = None


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`developer` is `system`. Text parts are joined by line ends. The fields after `name` are those of an answer that
    a client sends back."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant"]})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: NeutralOnly = None
    annotations: NeutralOnly = None
    audio: NeutralOnly = None
    function_call: NeutralOnly = None
    tool_calls: NeutralOnly = None
    tool_call_id: NeutralOnly = None


Messages = Annotated[list[Message], Meta(max_length=4096)]


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`"""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Meta(description="OpenAI's newer name of max_tokens.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Meta(description="0 to 20; needs logprobs.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Only with tool_choice none, for the template to see.")] = None
    tool_choice: NeutralOnly = None
    parallel_tool_calls: bool | None = None
    functions: NeutralOnly = None
    safety_identifier: NoEffect = None
    audio: NeutralOnly = None
    metadata: NeutralOnly = None
    modalities: NeutralOnly = None
    moderation: NeutralOnly = None
    prediction: NeutralOnly = None
    prompt_cache_options: NeutralOnly = None
    prompt_cache_retention: NeutralOnly = None
    reasoning_effort: NeutralOnly = None
    service_tier: NeutralOnly = None
    store: NeutralOnly = None
    verbosity: NeutralOnly = None
    web_search_options: NeutralOnly = None
    function_call: NeutralOnly = None


Prompt = Annotated[
    str | list[str | int | list[int]],
    Meta(description="A string, token ids, a list of strings, or a list of token id lists."),
]


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`"""

    prompt: Prompt
    echo: Annotated[bool | None, Meta(description="The prompt in front of the text; with logprobs, its log-probabilities.")] = None
    logprobs: Annotated[int | None, Meta(description="Alternatives per token, 0 to 20.")] = None
    best_of: NeutralOnly = None
    suffix: NeutralOnly = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default true. A chat template adds its own.")] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /detokenize`"""

    model: str | None = None
    tokens: list[int]


class WorkerRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/workers/migrate` and `/remove`"""

    name: str


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "include_obfuscation": (False,),
    "response_format": ({"type": "text"},),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "suffix": ("",),
}
"""Values, beside null, that ask for nothing."""

_NOT_BUILT = {
    "structured_outputs": "structured outputs are",
    "response_format": "structured outputs are",
    "functions": "tool calls are",
    "function_call": "tool calls are",
    "tool_calls": "tool calls are",
    "tool_call_id": "tool calls are",
}


def refuse_unserved(request: msgspec.Struct, where: str = "") -> None:
    """Raise for the first field that asks for something which is not served, naming it."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is None:
            continue
        if isinstance(value, StreamOptions):
            refuse_unserved(value, "stream_options.")
        elif name == "messages":
            for index, message in enumerate(value):
                refuse_unserved(message, f"messages[{index}].")
        elif (name in _NEUTRAL or name in _NOT_BUILT) and not _asks_for_nothing(value, name):
            raise _unserved(where + name, name)


def _asks_for_nothing(value: Any, name: str) -> bool:
    # true equals 1, and false 0
    return any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ()))


def _unserved(path: str, name: str) -> InvalidRequest:
    if name in _NOT_BUILT:
        return NotBuiltYet(f"{path}: {_NOT_BUILT[name]} not built yet: leave it out", param=path)
    neutral = " or ".join(msgspec.json.encode(value).decode() for value in _NEUTRAL[name])
    instead = f"leave it out or send {neutral}" if neutral else "leave it out"
    return InvalidRequest(f"{path} is not supported: {instead}", param=path, code="unsupported_field")
