"""From a conversation to the prompt that the model was trained on, by the template in its file."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Template, TemplateError

from tokenmill.core.errors import InvalidRequest
from tokenmill.text.budget import Budget, BudgetExceeded, Limits, weigh
from tokenmill.text.messages import map_texts, normalise
from tokenmill.text.sandbox import Sandbox
from tokenmill.text.tokenizer import Tokenizer

_LONGEST_SOURCE = 1 << 18
_LONGEST_TIME_FORMAT = 100
_LONGEST_MESSAGE = 1000


class ChatTemplate:
    """A Jinja chat template, run in a sandbox with limits on time, steps and size."""

    def __init__(
        self,
        source: str | None,
        bos: str = "",
        eos: str = "",
        *,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        limits: Limits = Limits(),
    ) -> None:
        """source: the template, None if the model file has none. bos, eos: texts of these tokens. now: for `strftime_now`.

        A template is compiled when it is first used, so that one that cannot be still leaves plain completions.
        """
        self._source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._now = now
        self._limits = limits

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation. `variables` are further names that the template may read.

        Raises `InvalidRequest` for messages that are not understood, and for a template that is missing, refuses
        the messages, fails, or exceeds its limits; the message is then the template's own.
        """
        checked = [self._known_role(message) for message in normalise(messages)]
        fixed = {"messages": checked, "tools": _check_tools(tools), "add_generation_prompt": add_generation_prompt}
        values = {**variables, **self._tokens, **fixed}
        template = self._template
        if isinstance(template, str):
            raise InvalidRequest(template, param="messages", code="no_chat_template")
        try:
            return self._run(template, values)
        except _Refusal as error:
            raise InvalidRequest(_said(error), param="messages") from None
        except BudgetExceeded as error:
            raise InvalidRequest(f"the model's chat template was stopped: {_said(error)}", param="messages") from None
        except _FAILURES as error:
            raise InvalidRequest(f"the model's chat template fails on these messages: {_said(error)}", param="messages") from None

    def _run(self, template: Template, values: dict[str, Any]) -> str:
        budget = Budget(self._limits, weigh(values, lambda _: None))
        parts = []
        with self._sandbox.spending(budget):
            for part in template.generate(values):
                budget.step()
                budget.size(len(part))
                parts.append(part)
        budget.size(sum(map(len, parts)))
        return "".join(parts)

    @functools.cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox({"raise_exception": _refuse, "strftime_now": self._time})

    @functools.cached_property
    def _template(self) -> Template | str:
        """The compiled template, or why there is none; either is found out once."""
        if self._source is None:
            return "the model has no chat template: use /v1/completions, or a model made for chat"
        if len(self._source) > _LONGEST_SOURCE:
            why = f"it has {len(self._source)} characters, and at most {_LONGEST_SOURCE} are read"
        else:
            try:
                return self._sandbox.build(self._source)
            except _FAILURES as error:
                why = _said(error)
        return f"the model's chat template cannot be used: {why}: use /v1/completions"

    def _known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """A developer speaks as the system where the template knows no developer, instead of being left out by it."""
        if message["role"] == "developer" and "developer" not in (self._source or ""):
            return {**message, "role": "system"}
        return message

    def _time(self, form: str) -> str:
        if not isinstance(form, str) or len(form) > _LONGEST_TIME_FORMAT:
            raise TemplateError(f"strftime_now takes a format of at most {_LONGEST_TIME_FORMAT} characters")
        return self._now().strftime(form)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """The prompt ids of a conversation, in which nothing that a message or tool says can become a special token.

    Raises as `ChatTemplate.render` and `Tokenizer.encode` do.
    """
    try:
        shielded = map_texts(normalise(messages), tokenizer.shield)
        tools = map_texts(tools, tokenizer.shield)
    except RecursionError:
        raise InvalidRequest("the messages or tools nest too deeply: send flatter ones", param="messages") from None
    return tokenizer.encode_shielded(template.render(shielded, tools, add_generation_prompt, **variables))


class _Refusal(TemplateError):
    """The template itself refuses the conversation, by `raise_exception`."""


_FAILURES = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError, SyntaxError, MemoryError)
"""What code made from a template can raise."""


def _said(error: BaseException) -> str:
    """The message of an error, which the template may have made as long as it liked."""
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    text = str(error) or type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


def _refuse(message: Any) -> NoReturn:
    raise _Refusal(str(message))


def _check_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest("tools must be a list of objects", param="tools")
    return list(tools) or None
