from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tokenmill.cli.eval import tasks
from tokenmill.cli.main import app
from tokenmill.core.errors import ConfigError, TokenmillError
from tokenmill.measure.quality.prompts import Task
from tokenmill.measure.report import Report
from tokenmill.weights.catalogue import resolve


def evaluate(*args: object) -> Report:
    result = CliRunner().invoke(app, ["eval", *map(str, args), "--json", "-"])
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=Report)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["perplexity", "m", "--kv", "int8"], "--kv is 'int8', but must be bf16 or KEY/VALUE[:GROUP][:plain]"),
        (["agreement", "m", "--sparse", "topk_heads:0.7"], "--sparse needs --budget-mb"),
        (["tasks", "m", "--budget-mb", "9"], "--budget-mb has no part without --sparse"),
        (["needle", "m", "--depths", "101"], "--depths is '101', but must be numbers between 0 and 100"),
        (["needle", "m", "--lengths", "9"], "--lengths is '9', but must be numbers between 256"),
        (["perplexity", "m", "--file", "/no/such/text"], "/no/such/text cannot be read as a text"),
        (["perplexity", "m", "--plot", "x.svg"], "--plot writes PNG"),
        (["perplexity", "no-such-model"], "unknown model 'no-such-model'"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_a_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["eval", *args])
    assert isinstance(result.exception, TokenmillError), result.output
    assert message in str(result.exception)


@pytest.mark.parametrize("name", ["perplexity", "agreement", "needle", "tasks"])
def test_what_the_engine_refuses_is_told_before_a_model_is_looked_for(name: str) -> None:
    result = CliRunner().invoke(app, ["eval", name, "no-such-model", "--kv", "int8/int4:48"])
    assert isinstance(result.exception, ConfigError), result.output
    assert "group_size is 48" in str(result.exception)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (100, r"--budget-mb: .* gives up nothing of texts of 512 tokens: it would with 12\.656$"),
        (1, r"--budget-mb is 1, but of .* 512 tokens take at least 5\.625: raise it$"),
        (0.01, r"--budget-mb is 0\.01, but of .* 512 tokens take at least 5\.625"),
    ],
)
def test_a_budget_that_says_nothing_about_a_level_is_refused_by_the_options_name(smollm2_path: Path, budget: float, message: str) -> None:
    args = ["--tokens", "512", "--window", "512", "--sparse", "topk_positions:0.5", "--budget-mb", str(budget)]
    result = CliRunner().invoke(app, ["eval", "perplexity", str(smollm2_path), *args])
    assert isinstance(result.exception, ConfigError), result.output
    assert re.search(message, str(result.exception))


@pytest.mark.parametrize("budget", [5.625, 12.656])
def test_the_budgets_that_are_named_do_it_and_a_format_that_they_do_nothing_for_is_told_of(smollm2_path: Path, budget: float) -> None:
    args = ["--tokens", "512", "--window", "512", "--file", __file__, "--sparse", "topk_positions:0.5", "--budget-mb", str(budget)]
    result = CliRunner().invoke(app, ["eval", "perplexity", str(smollm2_path), "--kv", "int8/int4:plain", *args, "--json", "-"])
    assert result.exit_code == 0, result.output
    assert [row["sparsified"] for row in msgspec.json.decode(result.stdout, type=Report).tables["perplexity"]] == [0, 0, 1, 0]
    assert re.search(r"--budget-mb: int8/int4:plain .* gives up nothing of texts of 512 tokens: it would with", result.stderr)


def test_a_level_that_gave_nothing_up_is_told_of(smollm2_path: Path) -> None:
    """The bound of lengths lets it pass, the questions are shorter."""
    args = ["--lengths", "400", "--depths", "50", "--each", "1", "--sparse", "topk_positions:0.5"]
    result = CliRunner().invoke(app, ["eval", "needle", str(smollm2_path), *args, "--budget-mb", "10"])
    assert result.exit_code == 0, result.output
    told = re.search(r"NOTHING was sparsified, --budget-mb is too large: .* it would with ([\d.]+)", result.output)
    assert told is not None, result.output
    found = evaluate("needle", smollm2_path, *args, "--budget-mb", told[1])
    assert [row["sparsified"] for row in found.tables["needle"]] == [0, 1]


@pytest.mark.parametrize(("name", "message"), [("needle", "500 tokens take at least 5.625"), ("tasks", "a prompt does not fit; 5.625")])
def test_a_prompt_beyond_the_budget_is_refused_by_the_options_name(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr(tasks, "all_tasks", lambda seed: [Task("english", "one two three " * 200, 2)])
    args = ["--lengths", "1000", "--depths", "50", "--each", "1"] if name == "needle" else []
    sparse = ["--kv", "int8/int4:plain", "--sparse", "topk_positions:0.5", "--budget-mb", "4"]
    result = CliRunner().invoke(app, ["eval", name, str(smollm2_path), *args, *sparse])
    assert isinstance(result.exception, ConfigError), result.output
    assert str(result.exception).startswith(f"--budget-mb is 4, but of bf16 topk_positions:0.5 of 4 MB {message}")


def test_perplexity_of_the_reference_is_that_of_the_model(smollm2_path: Path) -> None:
    found = evaluate("perplexity", smollm2_path, "--tokens", 512, "--window", 256)
    assert (found.family, found.benchmark, found.kernels is not None) == ("eval", "perplexity", True)
    rows = {row["text"]: row for row in found.tables["perplexity"]}
    assert {text: (row["variant"], row["tokens"], row["increase"]) for text, row in rows.items()} == {
        "english": ("bf16", 510, None),
        "python": ("bf16", 510, None),
        "all": ("bf16", 1020, None),
    }
    # a model that saw its text shuffled, or predicted the wrong position, would be far above a hundred
    assert 2 < float(rows["english"]["perplexity"] or 0) < 40
    assert 2 < float(rows["python"]["perplexity"] or 0) < 40


def test_agreement_reads_ones_own_text(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    chart = tmp_path / "chart.png"
    found = evaluate("agreement", smollm2_path, "--file", file, "--tokens", 128, "--window", 64, "--plot", chart)
    assert [(row["text"], row["tokens"], row["kl"]) for row in found.tables["agreement"]] == [("own.txt", 126, None)]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_short_needle_is_asked_for_with_and_without_it(smollm2_path: Path, tmp_path: Path) -> None:
    chart = tmp_path / "chart.png"
    found = evaluate("needle", smollm2_path, "--lengths", "300,400", "--depths", "50", "--each", 2, "--blind", "--plot", chart)
    rows = [(row["variant"], row["length"], row["questions"]) for row in found.tables["needle"]]
    assert rows == [(name, n, q) for name in ("bf16", "bf16, needle left out") for n, q in ((300, 2), (400, 2), ("all", 4))]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_tasks_compare_answers(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Task("copying", "Repeat this number and nothing else: 7", 4, ("7",)), Task("english", "Name three fruits.", 8)]
    monkeypatch.setattr(tasks, "all_tasks", lambda seed: asked)
    monkeypatch.setattr(tasks, "find_similarity", lambda: None)
    found = evaluate("tasks", smollm2_path)
    assert [(row["kind"], row["variant"], row["prompts"], row["same"]) for row in found.tables["tasks"]] == [
        ("copying", "bf16", 1, None),
        ("english", "bf16", 1, None),
    ]


@pytest.mark.heavy
def test_the_needle_proves_something(tmp_path: Path) -> None:
    """Whole attention finds it, and nobody guesses it."""
    found = evaluate("needle", resolve("qwen2.5-coder:1.5b"), "--lengths", "1024,4096", "--depths", "10,50,90", "--each", 4, "--blind")
    scores = {row["variant"]: float(row["score"] or 0) for row in found.tables["needle"] if row["length"] == "all"}
    assert scores["bf16"] >= 0.9
    assert scores["bf16, needle left out"] <= 0.1
