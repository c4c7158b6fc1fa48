"""`tokenmill eval tasks`"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.cli.bench.options import Json, Plot, Seed, note
from tokenmill.cli.bench.output import Output
from tokenmill.cli.eval import options
from tokenmill.cli.options import Cpus, Model, Template, Threads
from tokenmill.llm import LLM, Usage
from tokenmill.measure.quality.answers import TOGETHER, answers
from tokenmill.measure.quality.prompts import all_tasks
from tokenmill.measure.quality.similarity import find_similarity
from tokenmill.measure.quality.tasks import Answer, tasks_pictures, tasks_rows, tasks_table
from tokenmill.measure.report import Table
from tokenmill.weights.catalogue import resolve

LENGTH = 1024
"""Tokens that prompt and answer have room for."""


def command(
    model: Model,
    kv: options.Kv = None,
    sparse: options.Sparse = None,
    budget_mb: options.BudgetMb = None,
    chat_template: Template = None,
    threads: Threads = 0,
    cpus: Cpus = None,
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Compare answers: arithmetic, copying, English and Chinese prompts.

    Greedy answers are right or wrong where a number is asked for, and everywhere the same as the reference's or not. How near
    they are in meaning is told if the extra `similarity` is installed.
    """
    output = Output(json, plot)
    variants = options.chosen(kv, sparse, budget_mb, model)
    similarity = find_similarity()
    if similarity is None:
        note("similarity of answers is left out: it needs pip install 'tokenmill[similarity]'")
    report = options.begin("tasks", model, variants, seed=seed)
    table, given = tasks_table(), list[Answer]()

    def finished() -> Sequence[Table]:
        table.rows = tasks_rows(given, similarity)
        return [table]

    with output.of(report, finished, lambda: tasks_pictures(table)):
        path, tasks = resolve(model), all_tasks(seed)
        options.check_budget(variants, path, 1, LENGTH)
        for variant in variants:
            note(f"{variant.name}: {len(tasks)} prompts")
            settings = options.engine_settings(variant, threads, cpus, LENGTH, TOGETHER)
            with LLM(path, chat_template=chat_template, **settings) as llm, options.within_budget(variant, path, LENGTH):
                options.describe(report, llm)
                found = answers(llm, [task.prompt for task in tasks], [task.max_tokens for task in tasks])
                usages = list[Usage]()
                for task, answer in zip(tasks, found, strict=True):
                    said, sparsified = answer.outputs[0], answer.usage.kv.sparsified_from is not None
                    given.append(Answer(variant.name, task, said.text, tuple(said.token_ids), sparsified))
                    usages.append(answer.usage)
                options.note_useless(variant, path, usages)
