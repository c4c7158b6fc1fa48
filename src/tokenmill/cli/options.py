"""The options that `run` and `chat` share, and what they mean."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.core.errors import ConfigError
from tokenmill.core.kv_spelling import WIDE, Format, Sparsity, kv_settings
from tokenmill.core.types import SamplingParams

if TYPE_CHECKING:
    from tokenmill.llm import LLM

Model = Annotated[str, typer.Argument(help="A short name such as smollm2:135m, hf:org/repo[:file.gguf], or a path.")]
System = Annotated[str | None, typer.Option(help="A system message, which comes before the conversation.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens that together reach this probability.")]
TopK = Annotated[int, typer.Option(help="Sample from that many most likely tokens; 0 is no limit.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer; default: drawn anew each time.")]
Stop = Annotated[list[str] | None, typer.Option(help="A text that ends the answer and is not shown; may be given several times.")]
Threads = Annotated[int, typer.Option(min=0, help="0 takes all CPUs of this process, or those of --cpus.")]
Cpus = Annotated[str | None, typer.Option(help="Keep each thread on a CPU of its own, such as 0-3,8.", metavar="LIST")]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of prompt plus answer; default: the model's own context.")]
Template = Annotated[str | None, typer.Option(help="chatml, or a Jinja file, instead of the model's own.", metavar="chatml|FILE")]
Kv = Annotated[str, typer.Option("--kv", help="How keys and values are kept: bf16, or KEY/VALUE[:GROUP][:plain] such as int8/int4.")]
Sparse = Annotated[
    str | None,
    typer.Option(
        help="What an answer gives up near the end of its KV budget, or at a SHARE of it: topk_heads or topk_positions, "
        "and :KEEP_RATIO[@SHARE]."
    ),
]
KvBudgetMb = Annotated[float | None, typer.Option("--kv-budget-mb", help="MiB that the keys and values of one answer may take.")]

TEMPERATURE = 0.7
TOP_P = 0.95
KV = WIDE


def sampling(
    max_tokens: int | None, temperature: float, top_p: float, top_k: int, seed: int | None, stop: list[str] | None
) -> SamplingParams:
    """Sampling parameters from options. Raises `InvalidRequest` naming the one that is out of range."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ()))
    return params.check()


def kv_cache(kv: str, sparse: str | None, budget_mb: float | None) -> dict[str, Any]:
    """Settings of an engine. Raises `ConfigError`."""
    if budget_mb is not None and not 0 < budget_mb < 1e6:
        raise ConfigError(f"--kv-budget-mb is {budget_mb:g}, but must be above 0 and below 1000000", param="--kv-budget-mb")
    return kv_settings(Format.parse(kv), None if sparse is None else Sparsity.parse(sparse), budget_mb)


def open_model(
    model: str, chat_template: str | None, threads: int, cpus: str | None, max_model_len: int | None, cache: dict[str, Any]
) -> LLM:
    """The model, for one request at a time; pulled first if need be. cache: settings of its KV cache."""
    from tokenmill.llm import LLM

    return LLM(model, chat_template=chat_template, threads=threads, cpus=cpus, max_model_len=max_model_len, max_batch_size=1, **cache)


def note(text: str) -> None:
    """Tell the user something that is not part of the answer."""
    print(text, file=sys.stderr, flush=True)
