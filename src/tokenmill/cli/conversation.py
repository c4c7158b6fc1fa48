"""A conversation with a model: what was said, and the next answer."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

from tokenmill.core.types import SamplingParams

if TYPE_CHECKING:
    from tokenmill.llm import LLM

Message = dict[str, str]


class Conversation:
    """turns: question and answer in turn, without the system message. finish_reason: why the last answer ended; None
    if it was stopped or there was none."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Message] = []
        self.finish_reason: str | None = None
        self._llm = llm
        self._params = params

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer as it comes. Closing the generator stops it.

        What was yielded stays in the conversation as the answer; a question to which nothing was yielded leaves no trace.
        Raises as `LLM.stream_chat`.
        """
        self.finish_reason = None
        asked = {"role": "user", "content": question}
        stream = self._llm.stream_chat([*self._opening, *self.turns, asked], self._params)
        answer = ""
        try:
            with closing(stream):
                for text, result in stream:
                    self.finish_reason = result.outputs[0].finish_reason
                    answer += text
                    if text:
                        yield text
        finally:
            if answer:
                self.turns += [asked, {"role": "assistant", "content": answer}]

    def take_back(self) -> str | None:
        """Forget the last question and its answer; returns the question, None if there is none."""
        if not self.turns:
            return None
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        return question

    def clear(self) -> None:
        """Forget all that was said; the system message stays."""
        self.turns.clear()

    @property
    def _opening(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]
