"""An answer's stream of events, from chunks of bytes to what is recorded of a request. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.measure.serving import Record


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class EventReader:
    """Reads one answer into its record. Chunks are whatever the network made of the stream: parts of an event, or several."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""  # of a line whose end has not come
        self._ended = False

    def feed(self, chunk: bytes, arrived: float) -> None:
        """Once the record has an error, there is nothing more to feed."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            # Lines with other fields, comments and the empty lines between events say nothing here.
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), arrived)
                if self._record.error is not None:
                    return

    def end(self, arrived: float) -> None:
        """Nothing more comes; a last line need not have an end."""
        self.feed(b"\n", arrived)
        record = self._record
        if record.error is not None:
            return
        if not self._ended:
            record.error = "the stream ended before its end"
        elif not record.output_tokens:
            record.output_tokens = len(record.times)  # a server that tells no usage is taken to send a token at a time

    def _take(self, data: bytes, arrived: float) -> None:
        if not data:
            return
        if data == b"[DONE]":
            self._ended = True
            return
        record = self._record
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            record.error = f"an event that is not understood: {error}"
            return
        if event.error is not None:
            record.error = f"in the stream: {message(event.error)}"
            return
        if any(choice.has_text for choice in event.choices or ()):
            record.times.append(arrived)
        if event.usage is not None:
            details = event.usage.prompt_tokens_details
            record.prompt_tokens, record.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            record.cached_tokens = details.cached_tokens if details else None


def message(error: Any) -> str:
    """The words of an error object of OpenAI's API, or of whatever stands in its place."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
