"""Chat templates by explicit choice: for a model that brings none, or another than it brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenmill.core.errors import ConfigError
from tokenmill.text.chat import ChatTemplate
from tokenmill.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChosenTemplate:
    """source: Jinja. ends: texts that end an answer, in case the model has no token for them. built_in: ours, so that
    the begin token is put first exactly where the model's vocabulary asks for it."""

    source: str
    ends: tuple[str, ...] = ()
    built_in: bool = False

    def bind(self, tokenizer: Tokenizer) -> ChatTemplate:
        """The template for one model's vocabulary."""
        wants_bos = tokenizer.encode("")[:1] == [tokenizer.bos_id]
        bos = tokenizer.bos_text if wants_bos or not self.built_in else ""
        return ChatTemplate(self.source, bos, tokenizer.eos_text)


BUILT_IN = {
    "chatml": ChosenTemplate(
        source=(
            "{{ bos_token }}{% for message in messages %}"
            "{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
        ends=("<|im_end|>",),
        built_in=True,
    )
}


def choose_template(choice: str) -> ChosenTemplate:
    """The built-in template of that name (`chatml`), or the Jinja file of that path. Raises `ConfigError`."""
    if not isinstance(choice, str):
        raise ConfigError(f"chat_template must be a name or a path, not {type(choice).__name__}", param="chat_template")
    if choice in BUILT_IN:
        return BUILT_IN[choice]
    try:
        return ChosenTemplate(Path(choice).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"chat_template is {choice!r}: neither a built-in template ({', '.join(BUILT_IN)}) nor a file in UTF-8 ({why})",
            param="chat_template",
        ) from None
