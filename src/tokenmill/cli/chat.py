"""`tokenmill chat`"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from tokenmill.cli import options
from tokenmill.cli.conversation import Conversation
from tokenmill.cli.lines import LineReader
from tokenmill.core.errors import ContextLengthExceeded, InvalidRequest, TokenmillError

HELP = '''\
/help          this list
/clear         forget the conversation
/system TEXT   set the system message; without TEXT, show it
/regenerate    answer the last question once more
/exit          end (Ctrl-D too)
Ctrl-C stops an answer; what there is of it stays in the conversation.
Several lines: paste them, or put """ before the first and after the last.
A message that begins with / needs a space before it.'''


def command(
    model: options.Model,
    system: options.System = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer; default: what the context leaves.")] = None,
    temperature: options.Temperature = options.TEMPERATURE,
    top_p: options.TopP = options.TOP_P,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    chat_template: options.Template = None,
    threads: options.Threads = 0,
    cpus: options.Cpus = None,
    max_model_len: options.MaxModelLen = None,
    kv: options.Kv = options.KV,
    sparse: options.Sparse = None,
    kv_budget_mb: options.KvBudgetMb = None,
    speculate: options.Speculate = None,
    draft_model: options.DraftModel = None,
    draft_tokens: options.DraftTokens = None,
) -> None:
    """Talk to a model in the terminal.

    /help lists what else can be typed. Without a terminal each line of standard input is a message; answers go to
    standard output, everything else to standard error, and the exit status is 1 if a message could not be answered.
    """
    params = options.sampling(max_tokens, temperature, top_p, top_k, seed, stop)
    settings = options.kv_cache(kv, sparse, kv_budget_mb) | options.speculation(speculate, draft_model, draft_tokens)
    with options.open_model(model, chat_template, threads, cpus, max_model_len, settings) as llm:
        if not llm.can_chat:
            raise InvalidRequest(
                f"{llm.info.model} has no chat template: `tokenmill run --raw {model}` continues a text, "
                "and --chat-template chatml chats in a format that the model may not know"
            )
        session = Session(Conversation(llm, params, system), LineReader(), max_tokens)
        if session.reader.is_terminal:
            options.note(f"{llm.info.model}, context {llm.info.max_model_len} tokens. /help shows the commands, Ctrl-D ends.")
        session.run()
    if session.failed and not session.reader.is_terminal:
        raise typer.Exit(1)


class Session:
    """Reads entries and acts on them until the end of the input. failed: an entry led to an error."""

    def __init__(self, conversation: Conversation, reader: LineReader, max_tokens: int | None) -> None:
        self.reader = reader
        self.failed = False
        self._conversation = conversation
        self._max_tokens = max_tokens
        self._answering = False

    def run(self) -> None:
        """Returns at /exit and at the end of the input. Ctrl-C stops an answer, or on a terminal forgets a line."""
        while True:
            try:
                self._act(self.reader.read())
            except EOFError:
                if self.reader.is_terminal:
                    options.note("")
                return
            except KeyboardInterrupt:
                if not (self._answering or self.reader.is_terminal):
                    raise
                options.note("\n[stopped]" if self._answering else "\n[Ctrl-D or /exit ends]")
            except TokenmillError as error:
                self.failed = True
                options.note(_explain(error))
            finally:
                self._answering = False

    def _act(self, entry: str) -> None:
        word, _, rest = entry.partition(" ")
        match word:
            case "/exit":
                raise EOFError
            case "/help":
                options.note(HELP)
            case "/clear":
                self._conversation.clear()
                options.note("[the conversation is forgotten]")
            case "/system":
                self._set_system(rest.strip())
            case "/regenerate":
                self._regenerate()
            case _ if word.startswith("/"):
                raise InvalidRequest(f"{word} is no command: /help lists them (a space before / makes it a message)")
            case _:
                if entry.strip():
                    self._answer(entry)

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or self._conversation.system
        options.note(f"[system: {self._conversation.system or 'none'}]")

    def _regenerate(self) -> None:
        question = self._conversation.take_back()
        if question is None:
            raise InvalidRequest("there is no answer yet that could be made again")
        self._answer(question)

    def _answer(self, question: str) -> None:
        self._answering = True
        last = ""
        with closing(self._conversation.ask(question)) as pieces:
            for last in pieces:
                sys.stdout.write(last)
                sys.stdout.flush()
        if not last:
            options.note("[the model says nothing]")
        elif not last.endswith("\n"):
            print(flush=True)
        if self._conversation.finish_reason == "length":
            full = "the context is full, /clear begins a new conversation"
            options.note(f"[cut off: {full if self._max_tokens is None else f'--max-tokens {self._max_tokens}'}]")


def _explain(error: TokenmillError) -> str:
    if isinstance(error, ContextLengthExceeded):
        return f"tokenmill: the conversation has become too long: {error}\n/clear begins a new one"
    return f"tokenmill: {error}"
