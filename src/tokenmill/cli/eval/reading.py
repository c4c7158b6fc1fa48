"""What `perplexity` and `agreement` have in common: reading texts with every variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenmill.cli.bench.options import note
from tokenmill.cli.eval.options import check_budget, engine_settings
from tokenmill.core.config import EngineConfig
from tokenmill.engine.loading import load_model
from tokenmill.measure.quality.likelihood import Track
from tokenmill.measure.quality.reading import ROWS, read_beside
from tokenmill.measure.quality.variants import Variant
from tokenmill.measure.quality.windows import cut_windows
from tokenmill.measure.report import Report
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer


def read_texts(
    model: str,
    variants: Sequence[Variant],
    texts: dict[str, str],
    tokens: int,
    window: int,
    threads: int,
    cpus: str | None,
    report: Report,
    tracks: list[Track],
) -> None:
    """Fill `tracks`. Raises `ConfigError` for a text that is too short or a window longer than the model's context."""
    path = resolve(model)
    check_budget(variants, path, window, window)
    windows = _cut_texts(path, texts, tokens, window)
    settings = {v.name: engine_settings(v, threads, cpus, length=window + 1, sequences=1) for v in variants}
    configs = {name: EngineConfig.from_settings(model=str(path), chunk_size=ROWS, **own) for name, own in settings.items()}
    note(f"loading {model}")
    loaded = load_model(next(iter(configs.values())))
    report.kernels, report.threads, report.cpus = loaded.pool.variant, loaded.pool.threads, loaded.pool.cpus
    for line in read_beside(configs, loaded, windows, tracks):
        note(line)


def _cut_texts(path: Path, texts: dict[str, str], tokens: int, window: int) -> dict[str, list[list[int]]]:
    tokenizer = load_tokenizer(path)
    start = [] if tokenizer.bos_id is None or tokenizer.encode("a")[0] != tokenizer.bos_id else [tokenizer.bos_id]
    plain = {name: tokenizer.encode(text, add_special=False, parse_special=False) for name, text in texts.items()}
    return {name: cut_windows(ids, start, tokens, window, name) for name, ids in plain.items()}
