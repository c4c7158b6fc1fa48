"""`tokenmill run`"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tokenmill.cli import options
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.types import KVUsage, SamplingParams, SpeculationUsage

if TYPE_CHECKING:
    from tokenmill.llm import LLM, RequestOutput

DEFAULT_MAX_TOKENS = 1024

Stream = Generator[tuple[str, "RequestOutput"], None, None]


class Usage(msgspec.Struct, frozen=True):
    """Tokens; see docs/cli.md."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    kv: KVUsage
    speculation: SpeculationUsage | None


class Timings(msgspec.Struct, frozen=True):
    """Seconds, and tokens per second; see docs/cli.md."""

    load: float
    ttft: float
    itl: float | None
    total: float
    prompt_tokens_per_second: float
    tokens_per_second: float | None


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints; see docs/cli.md."""

    model: str
    mode: str
    text: str
    finish_reason: str | None
    usage: Usage
    timings: Timings
    seed: int
    kernels: str
    threads: int
    cpus: str | None


def command(
    model: options.Model,
    prompt: Annotated[str | None, typer.Argument(help="Read from standard input when it is absent or -.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    system: options.System = None,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Tokens of the answer; default: {DEFAULT_MAX_TOKENS}, or what the context leaves.")
    ] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end: text, usage, timings.")] = False,
) -> None:
    """Answer one prompt on standard output.

    The answer comes as it is made, and nothing else is written there. A model with a chat template answers the prompt
    as a message; one without continues it as a text, and says so.
    """
    params = options.sampling(max_tokens, temperature, top_p, top_k, seed, stop).with_seed()
    if raw and (system is not None or chat_template is not None):
        raise InvalidRequest(f"--raw uses no chat template: leave out {'--system' if system is not None else '--chat-template'}")
    if sys.stdout is None:
        raise InvalidRequest("standard output is closed: there is nowhere to write the answer to")
    text = read_prompt(prompt)
    settings = options.kv_cache(kv, sparse, kv_budget_mb) | options.speculation(speculate, draft_model, draft_tokens)
    with options.open_model(model, chat_template, threads, cpus, max_model_len, settings) as llm:
        chats = llm.can_chat and not raw
        if not chats and system is not None:
            raise InvalidRequest(f"--system needs a chat template, and {llm.info.model} has none: choose one with --chat-template")
        if not chats and not raw:
            options.note(f"{llm.info.model} has no chat template: the prompt is continued as a text (as with --raw)")
        with closing(_chat(llm, text, system, params) if chats else _complete(llm, text, params)) as stream:
            result = _follow(stream, show=not as_json)
        if as_json:
            report = _report(llm, "chat" if chats else "completion", result, params)
            print(msgspec.json.format(msgspec.json.encode(report)).decode(), flush=True)
        elif result.outputs[0].finish_reason == "length":
            options.note(f"cut off after {result.usage.completion_tokens} tokens: {_more(llm, result)}")


def read_prompt(given: str | None) -> str:
    """The prompt, from standard input if it is not an argument; there one last line feed is not part of it."""
    if given not in (None, "-"):
        text = given
    elif sys.stdin is None:
        raise InvalidRequest("there is no prompt, and standard input is closed: give a prompt")
    else:
        if sys.stdin.isatty():
            options.note("type the prompt; Ctrl-D at the start of a line ends it")
        text = _decode(sys.stdin.buffer.read()).removesuffix("\n")
    if not text:
        raise InvalidRequest("the prompt is empty: give one as an argument or on standard input")
    return text


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8: byte 0x{data[error.start]:02X} at {error.start}") from None


def _chat(llm: LLM, text: str, system: str | None, params: SamplingParams) -> Stream:
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = [*opening, {"role": "user", "content": text}]
    return llm.stream_chat(messages, _limited(params, llm, len(llm.apply_chat_template(messages))))


def _complete(llm: LLM, text: str, params: SamplingParams) -> Stream:
    ids = llm.tokenizer.encode(text)
    return llm.stream_generate(ids, _limited(params, llm, len(ids)))


def _limited(params: SamplingParams, llm: LLM, prompt_tokens: int) -> SamplingParams:
    """With the default limit, unless there is one. A prompt that leaves no room is refused later, with its numbers."""
    if params.max_tokens is not None:
        return params
    room = llm.info.max_model_len - prompt_tokens
    return msgspec.structs.replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)))


def _follow(stream: Stream, show: bool) -> RequestOutput:
    """Take the stream to its end, showing the text as it comes, with a line feed at its end."""
    last = ""
    for text, result in stream:
        last = text or last
        if show:
            sys.stdout.write(text + "\n" if result.finished and not last.endswith("\n") else text)
            sys.stdout.flush()
    return result


def _more(llm: LLM, result: RequestOutput) -> str:
    """What to do for a longer answer."""
    full = result.usage.prompt_tokens + result.usage.completion_tokens >= llm.info.max_model_len
    return f"the context of {llm.info.max_model_len} tokens is full" if full else "--max-tokens allows more"


def _report(llm: LLM, mode: str, result: RequestOutput, params: SamplingParams) -> Report:
    usage, metrics, choice = result.usage, result.metrics, result.outputs[0]
    assert metrics.ttft is not None, "a finished request has a first token"
    assert metrics.e2e is not None, "a finished request has an end"
    assert params.seed is not None, "the seed was drawn here"
    later = usage.completion_tokens - 1
    decode = metrics.e2e - metrics.ttft
    timings = Timings(
        load=llm.info.load_seconds,
        ttft=metrics.ttft,
        itl=decode / later if later else None,
        total=metrics.e2e,
        prompt_tokens_per_second=(usage.prompt_tokens - usage.cached_tokens) / metrics.ttft,
        tokens_per_second=later / decode if later else None,
    )
    spent = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.kv, usage.speculation)
    info = llm.info
    return Report(info.model, mode, choice.text, choice.finish_reason, spent, timings, params.seed, info.kernels, info.threads, info.cpus)
