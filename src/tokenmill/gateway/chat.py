"""`/v1/chat/completions`"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, NotBuiltYet
from tokenmill.core.types import MAX_LOGPROBS, SamplingParams
from tokenmill.gateway.body import json_response
from tokenmill.gateway.completion import Completion, Event
from tokenmill.gateway.logprobs import chat_logprobs
from tokenmill.gateway.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    Usage,
)
from tokenmill.gateway.sampling import sampling_params
from tokenmill.gateway.schemas import ChatRequest, refuse_unserved
from tokenmill.gateway.served_model import ServedModel
from tokenmill.gateway.stream import EventStream


async def answer_chat(model: ServedModel, request: ChatRequest, session: str | None) -> Response:
    """Answer a conversation, streaming or not. Raises `TokenmillError`."""
    arrived = time.monotonic()
    refuse_unserved(request)
    tools = _tools_to_show(request)
    params = _params(request, model.prompts.vocab_size)
    if model.prompts.answer_ends:
        params = msgspec.structs.replace(params, stop=(*params.stop, *model.prompts.answer_ends))
    model.cluster.require_ready()
    prompt = await model.prompts.from_messages(request.messages, tools)
    completion = model.complete(request, [prompt], params, "messages", session, arrived)
    chat = ChatAnswer(model, request, completion)
    events = completion.events(model.cluster)
    return EventStream(chat.chunks(events)) if request.stream else json_response(await chat.reply(events))


def _tools_to_show(request: ChatRequest) -> list[dict[str, object]] | None:
    """The tools that the template shows the model although it must not call them."""
    if request.tool_choice not in (None, "none", "auto"):
        raise NotBuiltYet("tool_choice: tool calls are not built yet: leave it out or send 'none'", param="tool_choice")
    if request.tools and request.tool_choice != "none":
        raise NotBuiltYet("tools: tool calls are not built yet: leave it out, or send tool_choice 'none'", param="tools")
    return request.tools or None


def _params(request: ChatRequest, vocab_size: int) -> SamplingParams:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs true beside it", param="top_logprobs")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs is {request.top_logprobs}, but must be between 0 and {MAX_LOGPROBS}", param="top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens is {request.max_tokens} and max_completion_tokens {request.max_completion_tokens}: send one of them",
            param="max_completion_tokens",
        )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return sampling_params(request, vocab_size, logprobs=logprobs, max_tokens=request.max_completion_tokens)


class ChatAnswer:
    """The answer to one conversation, as one reply or as chunks."""

    def __init__(self, model: ServedModel, request: ChatRequest, completion: Completion) -> None:
        self._tokenizer = model.prompts.tokenizer
        self._completion = completion
        self._id = f"chatcmpl-{completion.id}"
        self._created = int(time.time())
        self._model = request.model
        self._fingerprint = model.system_fingerprint
        self._with_ids = bool(request.return_token_ids)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._usage_in_chunks = bool(options and options.continuous_usage_stats)

    async def reply(self, events: AsyncGenerator[Event, None]) -> ChatReply:
        """Wait for all choices."""
        choices = [_Collected() for _ in range(self._completion.n)]
        async with contextlib.aclosing(events):
            async for event in events:
                choices[event.index].add(event, chat_logprobs(self._tokenizer, event.delta))
        return ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[choice.close(index, self._with_ids) for index, choice in enumerate(choices)],
            usage=self._completion.usage,
            system_fingerprint=self._fingerprint,
        )

    async def chunks(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[msgspec.Struct, None]:
        """Each choice: one role chunk, text, and one last chunk that has the finish reason and no text."""
        async with contextlib.aclosing(events):
            async for event in events:
                index, delta = event.index, event.delta
                if event.first:
                    yield self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
                tokens = delta.tokens if self._with_ids else UNSET
                logprobs = chat_logprobs(self._tokenizer, delta)
                if delta.text:
                    content = ChatDelta(content=delta.text)
                    yield self._chunk(ChatChunkChoice(index=index, delta=content, logprobs=logprobs, token_ids=tokens))
                    tokens, logprobs = [] if self._with_ids else UNSET, None
                if delta.finish_reason is not None:
                    reason = delta.finish_reason.value
                    yield self._chunk(
                        ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=logprobs, finish_reason=reason, token_ids=tokens)
                    )
        if self._with_usage:
            yield self._chunk(None, self._completion.usage)

    def _chunk(self, choice: ChatChunkChoice | None, usage: Usage | None = None) -> ChatChunk:
        if self._usage_in_chunks:
            usage = self._completion.usage
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[] if choice is None else [choice],
            system_fingerprint=self._fingerprint,
            usage=usage if self._with_usage else UNSET,
        )


class _Collected:
    """One choice as it grows."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: ChatLogprobs | None = None
        self._finish_reason = ""

    def add(self, event: Event, logprobs: ChatLogprobs | None) -> None:
        delta = event.delta
        self._text.append(delta.text)
        self._tokens += delta.tokens
        if self._logprobs is None:
            self._logprobs = logprobs
        elif logprobs is not None:
            self._logprobs.content += logprobs.content
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason.value

    def close(self, index: int, with_ids: bool) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(self._text)),
            logprobs=self._logprobs,
            finish_reason=self._finish_reason,
            token_ids=self._tokens if with_ids else UNSET,
        )
