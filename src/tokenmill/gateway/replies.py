"""What clients get. Field order is the order in the JSON; null where OpenAI's API has null."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.core.types import KVUsage, SpeculationUsage


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of the whole request, over all its prompts and choices. `speculation` is absent where nobody drafts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    kv: KVUsage
    speculation: SpeculationUsage | UnsetType = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """`bytes` is null for a special token, which is no text."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token, the one that ended the answer included."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Offsets count characters of the choice's `text`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """`usage` is absent unless it was asked for, and then null in all chunks but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """In a stream `finish_reason` is null in all chunks of a choice but its last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class CompletionReply(msgspec.Struct, kw_only=True):
    """Also the chunk of a stream, where `usage` is as in chat chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokenmill"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(msgspec.Struct, kw_only=True):
    prompt: str


class WorkerCard(msgspec.Struct, kw_only=True):
    """A worker. state: loading, down (being started again), draining, or as the gateway judges it: healthy, suspect, unhealthy. What is
    known of a process only is null without one; running, waiting: sequences, as last heard."""

    name: str
    model: str
    role: str
    state: str
    pid: int | None = None
    threads: int | None = None
    kv_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None


class WorkerList(msgspec.Struct, kw_only=True):
    """`GET /v1/workers`"""

    object: Literal["list"] = "list"
    data: list[WorkerCard]


class MigrateReply(msgspec.Struct, kw_only=True):
    """`POST /v1/workers/migrate`. migrated: requests that have left the worker."""

    name: str
    migrated: int


class RemoveReply(msgspec.Struct, kw_only=True):
    """`POST /v1/workers/remove`, when the worker has ended."""

    name: str
    removed: bool = True


class HealthReply(msgspec.Struct, kw_only=True):
    """`status`: ok, or loading, down, draining, stalled. `models`: the same of each, where there are several."""

    status: str
    models: dict[str, str] | UnsetType = UNSET
