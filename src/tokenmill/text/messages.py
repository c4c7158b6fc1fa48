"""The messages of a conversation, checked and brought into the one form that chat templates expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest

ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents and tool arguments as objects.

    Content may come as text, as a list of `{"type": "text", "text": …}` parts, which are joined by line feeds, or,
    beside tool calls, as None. Raises `InvalidRequest` naming the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages must be a list of messages, not a {type(messages).__name__}", param="messages")
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(entry, change) for entry in value]
    return value


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content, not a {type(message).__name__}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role is {role!r}: known roles are {', '.join(ROLES)}", param=f"{where}.role")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{where}.tool_calls must be a list, not {type(calls).__name__}", param=f"{where}.tool_calls")
    checked = {**message, "content": _content(message.get("content"), f"{where}.content", optional=bool(calls))}
    if calls:
        checked["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return checked


def _content(content: Any, where: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"{where} must be text or a list of text parts, not {type(content).__name__}", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            where = f"{where}[{index}]"
            raise InvalidRequest(f'{where} is {kind!r}, but only {{"type": "text", "text": …}} is understood', param=where)
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call whose arguments, JSON in a text as OpenAI sends them, are the object that templates print."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with a function that has a name", param=where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}", param=f"{where}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}
