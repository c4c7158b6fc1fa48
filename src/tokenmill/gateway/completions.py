"""`/v1/completions`"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from tokenmill.core.types import FinishReason
from tokenmill.gateway.body import json_response
from tokenmill.gateway.completion import Completion, Event
from tokenmill.gateway.logprobs import completion_logprobs, join, prompt_logprobs
from tokenmill.gateway.prompts import TextPrompt
from tokenmill.gateway.replies import CompletionChoice, CompletionLogprobs, CompletionReply, Usage
from tokenmill.gateway.sampling import sampling_params
from tokenmill.gateway.schemas import CompletionRequest, refuse_unserved
from tokenmill.gateway.served_model import ServedModel
from tokenmill.gateway.stream import EventStream


async def answer_completion(model: ServedModel, request: CompletionRequest, session: str | None) -> Response:
    """Continue one or several prompts, streaming or not. Raises `TokenmillError`."""
    arrived = time.monotonic()
    refuse_unserved(request)
    echoed = request.logprobs if request.echo else None
    params = sampling_params(request, model.prompts.vocab_size, logprobs=request.logprobs, prompt_logprobs=echoed)
    model.cluster.require_ready()
    prompts = await model.prompts.from_prompt(request.prompt, bool(request.echo))
    completion = model.complete(request, [prompt.ids for prompt in prompts], params, "prompt", session, arrived)
    answer = CompletionAnswer(model, request, completion, prompts)
    events = completion.events(model.cluster)
    return EventStream(answer.chunks(events)) if request.stream else json_response(await answer.reply(events))


class CompletionAnswer:
    """The answer to one request, as one reply or as chunks of the same shape."""

    def __init__(self, model: ServedModel, request: CompletionRequest, completion: Completion, prompts: list[TextPrompt]) -> None:
        self._tokenizer = model.prompts.tokenizer
        self._completion = completion
        self._prompts = prompts
        self._id = f"cmpl-{completion.id}"
        self._created = int(time.time())
        self._model = request.model
        self._fingerprint = model.system_fingerprint
        self._with_ids = bool(request.return_token_ids)
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._usage_in_chunks = bool(options and options.continuous_usage_stats)

    async def reply(self, events: AsyncGenerator[Event, None]) -> CompletionReply:
        """Wait for all choices."""
        parts: list[list[CompletionChoice]] = [[] for _ in range(len(self._prompts) * self._completion.n)]
        async with contextlib.aclosing(events):
            async for event in events:
                parts[event.index] += self._parts(event)
        return self._body([_merged(choice) for choice in parts], self._completion.usage)

    async def chunks(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[msgspec.Struct, None]:
        """Of each choice the echo, text, and one last chunk that has the finish reason and no text."""
        async with contextlib.aclosing(events):
            async for event in events:
                for part in self._parts(event):
                    usage = self._completion.usage if self._usage_in_chunks else None
                    yield self._body([part], usage if self._with_usage else UNSET)
        if self._with_usage:
            yield self._body([], self._completion.usage)

    def _parts(self, event: Event) -> list[CompletionChoice]:
        delta = event.delta
        place = event.index // self._completion.n
        parts = []
        prompt = self._prompts[place]
        if event.first and prompt.echo:
            parts.append(self._part(event.index, prompt.echo, self._prompt_logprobs(place), prompt.ids))
        logprobs = completion_logprobs(self._tokenizer, delta, len(prompt.echo))
        tokens = delta.tokens
        if delta.text:
            parts.append(self._part(event.index, delta.text, logprobs, tokens))
            logprobs, tokens = None, []
        if delta.finish_reason is not None:
            parts.append(self._part(event.index, "", logprobs, tokens, delta.finish_reason))
        return parts

    def _part(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, tokens: list[int], finish_reason: FinishReason | None = None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=None if finish_reason is None else finish_reason.value,
            token_ids=tokens if self._with_ids else UNSET,
        )

    def _prompt_logprobs(self, place: int) -> CompletionLogprobs | None:
        positions = self._completion.prompt_logprobs[place]
        if not positions:
            return None
        return prompt_logprobs(self._tokenizer, self._prompts[place].ids, self._prompts[place].echo, positions)

    def _body(self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None) -> CompletionReply:
        return CompletionReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=usage,
        )


def _merged(parts: list[CompletionChoice]) -> CompletionChoice:
    """The parts of a choice as one."""
    tokens = [token for part in parts if part.token_ids is not UNSET for token in part.token_ids]
    return CompletionChoice(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        logprobs=join(part.logprobs for part in parts),
        finish_reason=parts[-1].finish_reason,
        token_ids=UNSET if parts[-1].token_ids is UNSET else tokens,
    )
