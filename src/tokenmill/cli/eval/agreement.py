"""`tokenmill eval agreement`"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.cli.bench.options import Json, Plot
from tokenmill.cli.bench.output import Output
from tokenmill.cli.eval import options
from tokenmill.cli.eval.reading import read_texts
from tokenmill.cli.options import Cpus, Model, Threads
from tokenmill.measure.quality.likelihood import Track, agreement_pictures, agreement_rows, agreement_table
from tokenmill.measure.report import Table
from tokenmill.text.samples import evaluation_texts


def command(
    model: Model,
    kv: options.Kv = None,
    sparse: options.Sparse = None,
    budget_mb: options.BudgetMb = None,
    file: options.File = None,
    tokens: options.Tokens = options.TOKENS,
    window: options.Window = options.WINDOW,
    threads: Threads = 0,
    cpus: Cpus = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Compare next-token distributions with those of bf16 KV.

    At every position of the texts: the Kullback-Leibler divergence over the whole vocabulary, and whether the first choice is
    the same.
    """
    output = Output(json, plot)
    variants = options.chosen(kv, sparse, budget_mb, model)
    texts = evaluation_texts(file)
    report = options.begin("agreement", model, variants, texts=", ".join(texts), tokens=tokens, window=window)
    table, tracks = agreement_table(), list[Track]()

    def finished() -> Sequence[Table]:
        table.rows = agreement_rows(tracks)
        return [table]

    with output.of(report, finished, lambda: agreement_pictures(tracks, table)):
        read_texts(model, variants, texts, tokens, window, threads, cpus, report, tracks)
