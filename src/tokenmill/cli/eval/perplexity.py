"""`tokenmill eval perplexity`"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.cli.bench.options import Json, Plot
from tokenmill.cli.bench.output import Output
from tokenmill.cli.eval import options
from tokenmill.cli.eval.reading import read_texts
from tokenmill.cli.options import Cpus, Model, Threads
from tokenmill.measure.quality.likelihood import Track, perplexity_pictures, perplexity_rows, perplexity_table
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
    """Measure what a KV format costs in perplexity.

    Every variant reads the same windows of English and of Python beside the reference. The interval is that of the paired
    differences, which is far narrower than the perplexity's own.
    """
    output = Output(json, plot)
    variants = options.chosen(kv, sparse, budget_mb, model)
    texts = evaluation_texts(file)
    report = options.begin("perplexity", model, variants, texts=", ".join(texts), tokens=tokens, window=window)
    table, tracks = perplexity_table(), list[Track]()

    def finished() -> Sequence[Table]:
        table.rows = perplexity_rows(tracks)
        return [table]

    with output.of(report, finished, lambda: perplexity_pictures(table)):
        read_texts(model, variants, texts, tokens, window, threads, cpus, report, tracks)
