"""Requests to token ids. Long texts are worked on in threads, so that the event loop goes on answering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tokenmill.core.errors import InvalidRequest, NotBuiltYet
from tokenmill.gateway.schemas import Message

if TYPE_CHECKING:
    from tokenmill.text.templates import ChosenTemplate
    from tokenmill.text.tokenizer import Tokenizer

INLINE = 1024
"""Characters up to which a thread would cost more than the work."""

THREADS = 2

MAX_PROMPTS = 2048

T = TypeVar("T")


class TextPrompt(msgspec.Struct, frozen=True):
    """Token ids, and the text that an echo shows, empty without one."""

    ids: list[int]
    echo: str


class PromptBuilder:
    """A model's vocabulary and chat template, usable from the event loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, chosen: ChosenTemplate | None = None) -> None:
        """`chosen`: a chat template instead of the model's own."""
        from tokenmill.text.chat import ChatTemplate

        self.tokenizer = tokenizer
        self.vocab_size = min(vocab_size, tokenizer.vocab_size)
        own = ChatTemplate(tokenizer.chat_template, tokenizer.bos_text, tokenizer.eos_text)
        self._template = own if chosen is None else chosen.bind(tokenizer)
        self.answer_ends = () if chosen is None else chosen.ends
        """Texts that end an answer of a chat, besides the model's own end tokens."""
        self.can_chat = chosen is not None or tokenizer.chat_template is not None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")

    async def from_text(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        return await self._run(len(text), lambda: self.tokenizer.encode(text, add_special=add_special))

    async def from_messages(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation, ready for the answer. Raises `InvalidRequest` naming the message."""
        from tokenmill.text.chat import encode_chat

        plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
        size = sum(map(_size, messages))
        return await self._run(size, lambda: encode_chat(self.tokenizer, self._template, plain, tools))

    async def to_text(self, ids: list[int]) -> str:
        """The text of token ids, special tokens written out."""
        return await self._run(len(ids), lambda: self.tokenizer.decode(self._checked(ids, "tokens"), skip_special=False))

    async def from_prompt(self, prompt: str | list[str | int | list[int]], echo: bool) -> list[TextPrompt]:
        """The prompts of a text completion, with their texts if they are to be echoed."""
        size = len(prompt) if isinstance(prompt, str) else sum(1 if isinstance(part, int) else len(part) for part in prompt)
        return await self._run(size, lambda: [self._text_prompt(given, param, echo) for given, param in _split(prompt)])

    def close(self) -> None:
        """Start no more work in threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _text_prompt(self, given: str | list[int], param: str, echo: bool) -> TextPrompt:
        if isinstance(given, str):
            return TextPrompt(self.tokenizer.encode(given), given if echo else "")
        self._checked(given, param)
        return TextPrompt(given, self.tokenizer.decode(given, skip_special=False) if echo else "")

    def _checked(self, ids: list[int], param: str) -> list[int]:
        """Raises `InvalidRequest` for the first id outside the vocabulary."""
        for index, token in enumerate(ids):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"{param}[{index}] is token id {token}, but the vocabulary has the ids 0 to {self.vocab_size - 1}", param=param
                )
        return ids

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _split(prompt: str | list[str | int | list[int]]) -> list[tuple[str | list[int], str]]:
    """Each prompt and the name of the field that holds it."""
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if not prompt:
        raise InvalidRequest("prompt is an empty list: send a string, token ids, or a list of either", param="prompt")
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return [(ids, "prompt")]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries, but {MAX_PROMPTS} are the limit: split it", param="prompt")
    if len({type(part) for part in prompt}) > 1:
        raise InvalidRequest("prompt mixes kinds: send a string, token ids, a list of strings, or a list of token id lists", param="prompt")
    return [(part, f"prompt[{index}]") for index, part in enumerate(prompt) if not isinstance(part, int)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    """A message as templates expect it; its fields are checked where the template is rendered."""
    if message.role in ("tool", "function"):
        raise NotBuiltYet(f"{where}.role is {message.role!r}: tool calls are not built yet", param=f"{where}.role")
    content = message.content if isinstance(message.content, str | None) else [msgspec.to_builtins(part) for part in message.content]
    plain = {"role": message.role, "content": content}
    return plain if message.name is None else {**plain, "name": message.name}


def _size(message: Message) -> int:
    if message.content is None or isinstance(message.content, str):
        return len(message.content or "")
    return sum(len(part.text) for part in message.content)
