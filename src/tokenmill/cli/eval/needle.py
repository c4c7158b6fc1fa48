"""`tokenmill eval needle`"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from tokenmill.cli.bench.options import Json, Plot, Seed, note, numbers
from tokenmill.cli.bench.output import Output
from tokenmill.cli.eval import options
from tokenmill.cli.options import Cpus, Model, Template, Threads
from tokenmill.llm import LLM, Usage
from tokenmill.measure.quality.answers import TOGETHER, answers
from tokenmill.measure.quality.needle import (
    ANSWER_TOKENS,
    Haystack,
    Result,
    Sample,
    draw_samples,
    needle_pictures,
    needle_rows,
    needle_table,
)
from tokenmill.measure.quality.variants import REFERENCE
from tokenmill.measure.report import Table
from tokenmill.text.samples import evaluation_texts
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer


def command(
    model: Model,
    kv: options.Kv = None,
    sparse: options.Sparse = None,
    budget_mb: options.BudgetMb = None,
    blind: Annotated[bool, typer.Option("--blind", help="Also ask with the needle left out: what guessing scores.")] = False,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, about.")] = "1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Where the needle stands, percent of the text.")] = "10,30,50,70,90",
    each: Annotated[int, typer.Option(min=1, help="Texts of each length; every depth of each is asked for.")] = 4,
    file: options.File = None,
    chat_template: Template = None,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Ask for a sentence hidden in a long text.

    The text names the access codes of five vaults, and one of them is asked for. Every variant gets the same questions.
    """
    output = Output(json, plot)
    sizes, places = numbers(lengths, "--lengths", least=256), numbers(depths, "--depths", least=0, most=100)
    variants = options.chosen(kv, sparse, budget_mb, model)
    text = "\n\n".join(part for name, part in evaluation_texts(file).items() if name != "python")
    report = options.begin("needle", model, variants, lengths=sizes, depths=places, each=each, seed=seed)
    table, results = needle_table(places), list[Result]()

    def finished() -> Sequence[Table]:
        table.rows = needle_rows(results, places)
        return [table]

    with output.of(report, finished, lambda: needle_pictures(table, places)):
        path = resolve(model)
        tokenizer = load_tokenizer(path)
        haystack = Haystack(text, lambda part: len(tokenizer.encode(part, add_special=False, parse_special=False)))
        samples = draw_samples(haystack, sizes, places, each, seed)
        longest = sizes[-1] + ANSWER_TOKENS
        options.check_budget(variants, path, sizes[-1] // 2, longest)
        for variant in variants:
            settings = options.engine_settings(variant, threads, cpus, longest, TOGETHER)
            with LLM(path, chat_template=chat_template, **settings) as llm, options.within_budget(variant, path, longest):
                options.describe(report, llm)
                usages = _ask(llm, variant.name, samples, [sample.prompt for sample in samples], results)
                options.note_useless(variant, path, usages)
                if blind and variant == REFERENCE:
                    _ask(llm, f"{variant.name}, needle left out", samples, [sample.blind for sample in samples], results)


def _ask(llm: LLM, name: str, samples: Sequence[Sample], prompts: Sequence[str], results: list[Result]) -> list[Usage]:
    note(f"{name}: {len(prompts)} questions")
    usages = list[Usage]()
    for sample, answer in zip(samples, answers(llm, prompts, [ANSWER_TOKENS] * len(prompts)), strict=True):
        sparsified = answer.usage.kv.sparsified_from is not None
        results.append(Result(name, sample, sample.is_answered_by(answer.outputs[0].text), sparsified))
        usages.append(answer.usage)
    return usages
