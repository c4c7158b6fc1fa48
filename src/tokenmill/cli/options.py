"""The options that several commands share, and what they mean."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.core.config import MAX_DRAFT, SpeculativeConfig
from tokenmill.core.connectors import CONNECTORS, parse_connector
from tokenmill.core.errors import ConfigError
from tokenmill.core.kv_spelling import WIDE, Format, Sparsity, kv_settings
from tokenmill.core.types import SamplingParams

if TYPE_CHECKING:
    from tokenmill.cluster.division import Workers
    from tokenmill.cluster.health import HealthPolicy
    from tokenmill.cluster.joining import Listening
    from tokenmill.cluster.router import RouterPolicy
    from tokenmill.llm import LLM

PROPOSERS = ("ngram", "suffix", "draft", "combined")
STRATEGIES = ("min_decode_queue", "least_tokens", "prefix_aware", "power_of_two", "round_robin")

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
Speculate = Annotated[
    str | None,
    typer.Option(
        help="Who guesses how answers go on, for several tokens at a time: ngram, suffix, draft or combined; default: nobody.",
        metavar="METHOD",
    ),
]
DraftModel = Annotated[
    str | None, typer.Option(help="A smaller model of the same vocabulary that guesses (--speculate draft or combined).", metavar="MODEL")
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_DRAFT, help=f"Tokens that are guessed at a time at most; default: {SpeculativeConfig().num_speculative_tokens}."
    ),
]
Prefill = Annotated[
    int, typer.Option(min=0, help="Workers of each model that compute prompts, with which decode workers go on.", metavar="N")
]
Decode = Annotated[int, typer.Option(min=0, help="Workers of each model that decode.", metavar="N")]
Mixed = Annotated[
    int,
    typer.Option(
        min=0, help="Workers of each model that do both; one, unless --prefill or --decode is given.", metavar="N", show_default=False
    ),
]
Link = Annotated[
    str | None,
    typer.Option("--connector", help=f"How KV gets from worker to worker: {', '.join(CONNECTORS)}; default: shm.", metavar="NAME"),
]
SecretFile = Annotated[
    str | None, typer.Option(help="What workers show each other (--connector tcp or nixl): 16 random bytes at least.", metavar="FILE")
]
KvStore = Annotated[
    str | None,
    typer.Option(
        "--kv-store",
        help="Where KV is kept for all workers and their successors: valkey://HOST:PORT, or embedded, which starts such a server.",
        metavar="URL",
    ),
]
KvStoreFolder = Annotated[str | None, typer.Option(help="A folder for the same, beside a server or without one.", metavar="FOLDER")]
KvStoreGb = Annotated[
    float | None, typer.Option(help="GiB of the embedded server (default: 1), or of the folder if there is only one (16).", metavar="GIB")
]
KvStoreTtl = Annotated[
    int | None, typer.Option(help="Seconds for which the server keeps what nobody computes again; default: 3600.", metavar="SECONDS")
]
Strategy = Annotated[
    str | None,
    typer.Option("--routing-strategy", help=f"Who gets a request: {', '.join(STRATEGIES)}; default: {STRATEGIES[0]}.", metavar="NAME"),
]
HealthCheckInterval = Annotated[
    float | None, typer.Option(help="Seconds; after twice as many a worker that does not move gets no work. Default: 5.", metavar="SECONDS")
]

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


def speculation(method: str | None, draft_model: str | None, draft_tokens: int | None) -> dict[str, Any]:
    """Settings of an engine. Raises `ConfigError`."""
    if method is not None and method not in PROPOSERS:
        raise ConfigError(f"--speculate is {method!r}, but must be {', '.join(PROPOSERS[:-1])} or {PROPOSERS[-1]}", param="--speculate")
    if method == "draft" and draft_model is None:
        raise ConfigError("--speculate draft needs a model: name one with --draft-model, or choose suffix", param="--draft-model")
    if method in ("ngram", "suffix") and draft_model is not None:
        raise ConfigError(f"--speculate {method} has no use for --draft-model: leave one out, or choose combined", param="--draft-model")
    if method is None and draft_model is None:
        if draft_tokens is not None:
            raise ConfigError("--draft-tokens needs --speculate or --draft-model beside it", param="--draft-tokens")
        return {}
    most = {} if draft_tokens is None else {"num_speculative_tokens": draft_tokens}
    return {"speculative_config": {"method": method, "model": draft_model} | most}


def only_of_one(models: Sequence[str], **given: object) -> None:
    """Raises `ConfigError` for several models and an option that is of one, and for a model that is named twice."""
    for model in models:
        if models.count(model) > 1:
            raise ConfigError(f"model {model!r} is given twice: name it once (--mixed 2 gives it two workers)", param="model")
    for name, value in given.items():
        if value and len(models) > 1:
            option = "--" + name.replace("_", "-")
            what = f"{option} is for one model, and there are {len(models)} ({', '.join(models)})"
            raise ConfigError(f"{what}: leave it out, or serve them by servers of their own", param=option)


def served_names(models: Sequence[str], paths: Sequence[Path], chosen: Sequence[str]) -> list[list[str]]:
    """What clients call each model. chosen: what they are to call the only one.

    Raises `ConfigError` for a name that would be two models'.
    """
    if chosen:
        return [list(chosen)]
    names = [path.stem if Path(model).expanduser() == path else model for model, path in zip(models, paths, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        found = " and ".join(str(path) for path, name in zip(paths, names, strict=True) if name == twice)
        raise ConfigError(f"{found} would both be called {twice!r}: rename one, or link to it by another name", param="model")
    return [[name] for name in names]


def workers(prefill: int, decode: int, mixed: int, joining: bool = False) -> Workers:
    """How many of which role; without any, one that is mixed, unless others join. Raises `ConfigError`."""
    from tokenmill.cluster.division import Workers

    return Workers(prefill=prefill, decode=decode, mixed=mixed or int(not prefill and not decode and not joining), joining=joining)


def listening(address: str, secret_file: str | None, cert: str | None, key: str | None) -> Listening:
    """Where workers of other hosts join. Raises `ConfigError`."""
    import ssl

    from tokenmill.cluster.joining import Listening
    from tokenmill.core.proof import read_secret, require_secret
    from tokenmill.core.sockets import parse_address
    from tokenmill.gateway.server import listen

    host, port = parse_address(address, param="--listen-workers")
    if secret_file is None:
        raise ConfigError(
            "--listen-workers needs --secret-file, a file with at least 16 random bytes (openssl rand -hex 32) that all workers have",
            param="--secret-file",
        )
    secret = require_secret(read_secret(secret_file), "--secret-file")
    if (cert is None) != (key is None):
        raise ConfigError("--workers-tls-cert and --workers-tls-key belong together: give both or none", param="--workers-tls-cert")
    tls = None
    if cert is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            tls.load_cert_chain(cert, key, password="")
        except OSError as error:
            raise ConfigError(f"--workers-tls-cert {cert} cannot be used: {error.strerror or error}", param="--workers-tls-cert") from None
    return Listening(listen(host, port), secret, tls)


def transfer(chosen: Workers, connector: str | None, secret_file: str | None) -> dict[str, Any]:
    """Settings of an engine. Raises `ConfigError`."""
    if connector is None and (secret_file is None or chosen.joining):
        return {}
    given = "--secret-file" if connector is None else "--connector"
    _need_several(chosen, given)
    if connector is None:
        raise ConfigError("--secret-file is for --connector tcp or nixl: leave it out, or choose one of them", param="--secret-file")
    if parse_connector(connector) == "shm" and secret_file is not None and not chosen.joining:
        raise ConfigError(
            "--connector shm does not leave the host and has no use for --secret-file: leave it out, or choose tcp", param="--secret-file"
        )
    if connector != "shm" and secret_file is None:
        raise ConfigError(
            f"--connector {connector} needs --secret-file, a file with at least 16 random bytes (openssl rand -hex 32): name one, or "
            "choose shm, which needs none",
            param="--secret-file",
        )
    return {"kv_transfer_config": {"connector": connector, "secret_file": None if connector == "shm" else secret_file}}


def store(url: str | None, folder: str | None, size_gb: float | None, ttl: int | None) -> dict[str, Any]:
    """Settings of an engine. Raises `ConfigError`."""
    if url in (None, "none") and folder is None:
        for option, given in (("--kv-store-gb", size_gb), ("--kv-store-ttl", ttl)):
            if given is not None:
                raise ConfigError(f"{option} is for a KV store: leave it out, or choose one (--kv-store embedded)", param=option)
        return {}
    chosen: dict[str, Any] = {"url": None if url == "none" else url, "folder": folder}
    if size_gb is not None:
        chosen["folder_gb" if chosen["url"] is None else "memory_gb"] = size_gb
    if ttl is not None:
        chosen["ttl"] = ttl
    return {"kv_store_config": chosen}


def routing(chosen: Workers, strategy: str | None, health_check_interval: float | None) -> tuple[RouterPolicy, HealthPolicy]:
    """Raises `ConfigError`."""
    from tokenmill.cluster.health import HealthPolicy
    from tokenmill.cluster.router import RouterPolicy

    if strategy is not None:
        _need_several(chosen, "--routing-strategy")
        if strategy not in STRATEGIES:
            raise ConfigError(
                f"--routing-strategy is {strategy!r}, but must be {', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}",
                param="--routing-strategy",
            )
    if health_check_interval is not None:
        _need_several(chosen, "--health-check-interval")
        if not 0 < health_check_interval <= 3600:
            raise ConfigError(
                f"--health-check-interval is {health_check_interval:g}, but must be above 0 and at most 3600 seconds",
                param="--health-check-interval",
            )
    router = RouterPolicy() if strategy is None else RouterPolicy(routing_strategy=strategy)
    return router, HealthPolicy() if health_check_interval is None else HealthPolicy(health_check_interval=health_check_interval)


def _need_several(chosen: Workers, option: str) -> None:
    if chosen.total == 1 and not chosen.joining:
        raise ConfigError(
            f"{option} is for several workers of a model, and there is one: leave it out, or add workers (--prefill 1 --decode 1)",
            param=option,
        )


def open_model(
    model: str, chat_template: str | None, threads: int, cpus: str | None, max_model_len: int | None, settings: dict[str, Any]
) -> LLM:
    """The model, for one request at a time; pulled first if need be. settings: further ones of the engine."""
    from tokenmill.llm import LLM

    return LLM(model, chat_template=chat_template, threads=threads, cpus=cpus, max_model_len=max_model_len, max_batch_size=1, **settings)


def note(text: str) -> None:
    """Tell the user something that is not part of the answer."""
    print(text, file=sys.stderr, flush=True)
