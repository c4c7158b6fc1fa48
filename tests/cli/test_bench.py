from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import serving
from typer.testing import CliRunner

from tokenmill.cli.main import app
from tokenmill.core.cpus import usable_cpus
from tokenmill.core.errors import ConfigError, TokenmillError
from tokenmill.measure import kernels, kv_pages, kv_sharing
from tokenmill.measure.report import Report
from tokenmill.measure.server import OwnServer

RUN = "from tokenmill.cli.main import main; main()"
COMMAND = [sys.executable, "-c", RUN, "bench"]


def bench(*args: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=120, check=False, **settings)


def report(result: subprocess.CompletedProcess[str]) -> Report:
    """What `--json -` printed: all of standard output, and of the fields that are documented."""
    assert result.returncode == 0, result.stderr
    return msgspec.json.decode(result.stdout, type=Report)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve"], "give a MODEL to measure it here, or --url URL of a server"),
        (["serve", "m", "--url", "http://h"], "give a MODEL or --url URL, not both"),
        (["serve", "m", "--model", "x"], "--model has no part in measuring a MODEL"),
        (["serve", "m", "--rate", "1", "--concurrency", "2"], "give --rate (open loop) or --concurrency (closed loop), not both"),
        (["serve", "m", "--rate", "0"], "--rate is 0, but must be above 0"),
        (["serve", "m", "--slo-ttft", "-1"], "--slo-ttft is -1, but must be above 0"),
        (["serve", "m", "--prompt-tokens", "many"], "--prompt-tokens is 'many'"),
        (["serve", "--url", "nowhere"], "--url is 'nowhere', but must be like http://"),
        (["serve", "--url", "http://h", "--threads", "2"], "--threads has no part in measuring --url"),
        (["latency", "--url", "http://h", "--cpus", "0"], "--cpus has no part in measuring --url"),
        (["pd", "m", "--threads", "1"], "there is 1 thread for two workers: give --threads 2"),
        (["pd", "m", "--chunks", "4"], "--chunks is '4', but must be numbers between 8 and 16384 or paced"),
        (["pd", "m", "--rates", "0"], "--rates is '0', but must be numbers above 0"),
        (["pd", "m", "--slo-itl", "0"], "--slo-itl is 0, but must be above 0"),
        (["kernels", "--cpus", "0,0"], "cpus is '0,0', which lists 0 twice"),
        (["kernels", "--threads", "2", "--cpus", "0"], "threads is 2, but cpus lists 1 (0)"),
        (["serve", "--url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9/v1: ClientConnectorError: [Errno "),
        (["serve", "no-such-model"], "the server did not start: unknown model 'no-such-model'"),
        (["latency", "m", "--endpoint", "chat"], "--endpoint has no part in measuring a MODEL in this process"),
        (["latency", "m", "--streams", "1,x"], "--streams is '1,x', but must be numbers between 1 and 4096"),
        (["latency", "--url", "http://127.0.0.1:9", "--model", "m"], "did not answer a first request: ClientConnectorError: [Errno "),
        (["throughput", "m", "--tape", "--requests", "3"], "--requests has no part in --tape"),
        (["throughput", "m", "--batch-sizes", "4", "--output-tokens", "3"], "--output-tokens has no part in --batch-sizes"),
        (["throughput", "m", "--context", "3"], "--context has no part in a batch job"),
        (["throughput", "m", "--tape", "--prompt-tokens", "1-2"], "--prompt-tokens must be one number with --tape"),
        (["throughput", "m", "--json", "/no/such/folder/x"], "--json: /no/such/folder/x cannot be written"),
        (["throughput", "m", "--tape", "--plot", "x.svg"], "--plot writes PNG, so x.svg must end in .png"),
        (["throughput", "no-such-model"], "unknown model 'no-such-model'"),
        (["kv", "no-such-model"], "unknown model 'no-such-model'"),
        (["spec", "no-such-model"], "unknown model 'no-such-model'"),
        (["spec", "m", "--methods", "draft"], "--methods: draft needs --draft-model"),
        (["spec", "m", "--methods", "suffix", "--draft-model", "x"], "--draft-model has no part in --methods suffix"),
        (["spec", "m", "--methods", "magic"], "speculative_config"),
        (["spec", "m", "--workloads", "edit,sing"], "--workloads: there is no 'sing', only edit, extract, code, chat"),
        (["spec", "m", "--streams", "17"], "--streams is '17', but must be numbers between 1 and 16"),
        (["kernels", "m", "--forms", "Q4_1"], "--forms has no part in measuring a MODEL"),
        (["kernels", "--rows", "0"], "--rows is '0', but must be numbers between 1 and 4096"),
        (["kernels", "--forms", "Q9"], "--forms: there is no weight form 'Q9'"),
        (["kernels", "--kv", "int8"], "--kv is 'int8', but must be bf16 or KEY/VALUE[:GROUP][:plain]"),
        (["kernels", "--kv", "int8/int4:48"], "group_size is 48, but must be a multiple of 32"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *args])
    assert isinstance(result.exception, TokenmillError), result.output
    assert message in str(result.exception)
    assert result.stdout == ""


def test_an_error_is_a_line_without_a_traceback() -> None:
    result = bench("serve", "--url", "http://127.0.0.1:9")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("tokenmill: cannot reach http://127.0.0.1:9/v1: ClientConnectorError: [Errno ")
    assert len(result.stderr.splitlines()) == 1


def test_kernels_are_measured_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "largest_cache", lambda: 1 << 20)
    monkeypatch.setattr(kernels, "CONTEXTS", (16, 64))
    file = tmp_path / "kernels.json"
    args = ["bench", "kernels", "--forms", "Q4_K", "--rows", "1,2", "--kv", "int8/int4:32", "--threads", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["tokenmill", *args])
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "ceilings: reads" in result.stdout
    written = msgspec.json.decode(file.read_bytes(), type=Report)
    # of the reference shapes only `down` has rows that are whole blocks of 256
    assert [(row["op"], row["form"], row["rows"]) for row in written.tables["linear"]] == [("down", "Q4_K", 1), ("down", "Q4_K", 2)]
    decode = next(row for row in written.tables["attention"] if row["phase"] == "decode")
    # 3 KV heads of 64 channels: 64 + 32 bytes and scales of two groups for each of the 17 positions
    assert float(decode["bytes_per_second"] or 0) * float(decode["seconds"] or 0) == pytest.approx(3 * 108 * 17)
    assert written.ceilings is not None
    assert written.command == ["tokenmill", *args]


def test_users_that_are_too_long_are_refused_before_anything_is_measured(smollm2_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "kv", str(smollm2_path), "--prompt-tokens", "8000"])
    assert isinstance(result.exception, ConfigError)
    message = str(result.exception)
    assert message.startswith("prompts of 8032 tokens and answers beside 15 others take 8555, but the model's context is 8192: lower")
    assert result.output == ""


def test_the_kv_cache_is_measured(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pages, "LONG", 256)
    monkeypatch.setattr(kv_pages, "CASES", ((1, 80), (2, 64)))
    monkeypatch.setattr(kv_pages, "RUNS", 5)
    monkeypatch.setattr(kv_sharing, "ROUNDS", 1)
    file, picture = tmp_path / "kv.json", tmp_path / "kv.png"
    args = ["--users", "3", "--prompt-tokens", "160", "--question-tokens", "9", "--threads", "1", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "kv", str(smollm2_path), *args, "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    written = msgspec.json.decode(file.read_bytes(), type=Report)
    sharing = written.tables["sharing"]
    assert [(row["sharing"], row["arrival"], row["once"]) for row in sharing] == [
        ("none", "together", 0),
        ("radix", "together", 1),
        ("radix", "one by one", 1),
    ]
    # Of 160 tokens in 20 frames two users have none of their own.
    saved = 2 * 20 * 8 * 23040
    assert [row.get("saved_bytes") for row in sharing] == [0, saved, None]
    held, shared = (float(row["kv_bytes"] or 0) for row in sharing[:2])
    assert held >= 3 * 22 * 8 * 23040
    assert held - shared >= saved - 3 * 8 * 8 * 23040, "apart from the tokens of answers"
    steps = written.tables["steps"]
    assert [(row["streams"], row["policy"]) for row in steps] == [(n, p) for n in (1, 2) for p in ("dynamic", "8", "16", "32", "64")]
    assert {row["policy"]: row["entries"] for row in steps[:5]} == {"dynamic": 8, "8": 8, "16": 4, "32": 3, "64": 2}
    limits = written.tables["limits"]
    assert len(limits) == 7
    assert [row["verdict"] for row in limits[:3]] == ["held", "held", "not judged"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_speculation_is_measured_beside_plain_decoding(smollm2_path: Path, tmp_path: Path) -> None:
    file, picture = tmp_path / "spec.json", tmp_path / "spec.png"
    args = ["--workloads", "code,chat", "--streams", "1,2", "--prompts", "2", "--tokens", "24", "--rounds", "1", "--threads", "1"]
    drafts = ["--draft-model", str(smollm2_path), "--methods", "suffix,draft", "--draft-tokens", "4", "--temperature", "0.5"]
    result = CliRunner().invoke(app, ["bench", "spec", str(smollm2_path), *args, *drafts, "--json", str(file), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    written = msgspec.json.decode(file.read_bytes(), type=Report)
    rows = written.tables["speculation"]
    cases = [(workload, streams) for workload in ("code", "chat") for streams in (1, 2)]
    assert [(row["workload"], row["streams"], row["method"]) for row in rows] == [
        (*c, m) for c in cases for m in ("none", "suffix", "draft")
    ]
    for row in rows:  # two answers without their first tokens, as long as both go on: drafts may end one of them earlier
        assert row["tokens"] == 46 or (row["method"] != "none" and row["streams"] == 2 and 23 < float(row["tokens"] or 0) < 46), row
    for row in rows:
        assert (row["speedup"] is None) == (row["method"] == "none")
        if row["method"] == "draft":  # the model drafts for itself, with the same noise: as slow as it is right
            assert row["acceptance"] in (None, 1)
            assert row["allowed"] == pytest.approx(1, abs=0.2)
    drafting = [(row["workload"], row["streams"], row["method"]) for row in rows if row["drafts"]]
    assert [(row["workload"], row["streams"], row["method"]) for row in written.tables["positions"]] == drafting
    costs = written.tables["costs"]
    assert [row["rows"] for row in costs] == list(range(1, 11)), "two streams and their drafts, at most"
    assert all(float(row["draft"] or 0) > 0 for row in costs)
    assert next(str(row["name"]) for row in written.tables["limits"]).startswith("speed-up of code, one stream, with a draft model, draft")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_forward_pass_is_measured_as_json(smollm2_path: Path, tmp_path: Path) -> None:
    chart = tmp_path / "steps.png"
    args = ["--tape", "--prompt-tokens", "16", "--batch-sizes", "1,2", "--context", "8", "--threads", "1", "--plot", str(chart)]
    found = report(bench("throughput", str(smollm2_path), *args, "--json", "-"))
    rows = [(row["phase"], row["tokens"]) for row in found.tables["forward"]]
    assert rows == [("prefill", 16), ("decode", 1), ("decode", 2)]
    assert found.settings == {"seed": 0, "prompt_tokens": 16, "batch_sizes": [1, 2], "context": 8}
    assert (found.benchmark, found.model, found.threads) == ("throughput", str(smollm2_path), 1)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_separation_is_measured_beside_mixed_engines(smollm2_path: Path, tmp_path: Path) -> None:
    args = ["--streams", "2", "--prompts", "2", "--rates", "8", "--prompt-tokens", "96,128", "--answer-tokens", "4", "--chunks", "64"]
    chart = tmp_path / "pd.png"
    found = report(bench("pd", str(smollm2_path), *args, "--threads", "2", "--prefill-chunk", "32", "--plot", str(chart), "--json", "-"))
    assert (found.threads, found.settings["prompt_tokens"], found.settings["slo_itl"]) == (2, [96, 128], 0.15)
    setups = ("separated", "mixed 2048", "mixed 64")
    rows = found.tables["setups"]
    assert [(row["prompt_tokens"], row["setup"], row["prompts"]) for row in rows] == [(n, s, 2) for n in (96, 128) for s in setups]
    assert all(float(row["gaps"] or 0) > 0 < float(row["ttft_p50"] or 0) for row in rows)
    transfers = found.tables["transfers"]
    assert [(row["handed_over"], row["chunks"], row["bytes"]) for row in transfers] == [(2, 3, 23_040 * 96), (2, 4, 23_040 * 128)]
    assert [row["by"] for row in found.tables["rivals"]] == ["ITL p99", "good share"] * 2
    assert len(found.tables["limits"]) == 4
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_batch_job_prints_a_table(smollm2_path: Path) -> None:
    args = ["--requests", "2", "--prompt-tokens", "4-8", "--output-tokens", "24", "--threads", "1"]
    result = bench("throughput", str(smollm2_path), *args)
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.split("offline throughput\n")[1].splitlines()] == [
        *("phase", "prefill", "decode", "output", "total")
    ]


def test_latency_of_a_model_has_floors(smollm2_path: Path) -> None:
    args = ["--prompt-tokens", "8", "--streams", "1,2", "--output-tokens", "3", "--rounds", "1", "--threads", "1", "--json", "-"]
    rows = report(bench("latency", str(smollm2_path), *args)).tables["latency"]
    assert [(row["streams"], row["prompt_tokens"], row["ttft_floor"] is None) for row in rows] == [(1, 8, False), (2, 8, True)]
    assert all(row["itl_ratio"] == pytest.approx(float(row["itl_floor"] or 0) / float(row["itl_p50"] or 0)) for row in rows)


def test_a_server_of_our_own_is_put_under_load(smollm2_path: Path) -> None:
    args = ["--rate", "50", "--requests", "6", "--prompt-tokens", "4", "--output-tokens", "2-3", "--shared-prefix", "24"]
    slo = ["--slo-ttft", "60000", "--slo-itl", "60000"]
    cpu = str(max(usable_cpus()))
    found = report(bench("serve", str(smollm2_path), *args, *slo, "--cpus", cpu, "--json", "-"))
    (row,) = found.tables["totals"]
    assert (row["requests"], row["completed"], row["failed"], row["good_share"]) == (6, 6, 0, 1.0)
    assert row["prompt_tokens"] == 6 * 28
    assert int(row["cached_tokens"] or 0) > 0
    assert 12 <= int(row["output_tokens"] or 0) <= 18
    assert {time["what"] for time in found.tables["times"]} == {"TTFT", "ITL", "TPOT", "E2E", "client lag"}
    assert (found.threads, found.cpus) == (1, cpu)


def test_a_servers_engine_keeps_its_threads_on_the_cpus_that_it_is_given(smollm2_path: Path) -> None:
    cpus = sorted(usable_cpus(), reverse=True)
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    with OwnServer(str(smollm2_path), 0, ",".join(map(str, cpus))) as own:
        kept = [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{own.engine_pid}/task")]
    assert own.threads == len(cpus)
    assert [allowed for allowed in kept if len(allowed) == 1] == [{cpu} for cpu in cpus[1:]]


def test_our_own_server_is_gone_afterwards(smollm2_path: Path) -> None:
    with OwnServer(str(smollm2_path), 1) as own:
        process = own._process
        assert process.poll() is None
        assert own.url.startswith("http://127.0.0.1:")
    assert process.poll() is not None


KILLED = """
import os, signal, sys
from tokenmill.measure.server import OwnServer
with OwnServer(sys.argv[1], 1) as own:
    print(own.url, flush=True)
    while not own._process.stdout.readline().startswith("  try"):
        pass  # what it says at the start: a server that still speaks dies of the broken pipe anyway
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_our_own_server_ends_with_a_benchmark_that_is_killed(smollm2_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", KILLED, str(smollm2_path)], capture_output=True, text=True, timeout=60)
    assert found.returncode == -signal.SIGKILL, found.stderr

    def refused() -> bool:
        try:
            httpx.get(f"{found.stdout.strip()}/health", timeout=5)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:  # it is just going away
            return False
        return False

    serving.until(refused)


def test_ctrl_c_shows_what_was_measured_until_then() -> None:
    with serving.scripted(script={"step_seconds": 0.01}) as served:
        args = ["serve", "--url", served.url, "--model", "parrot", "--rate", "100", "--duration", "60", "--json", "-"]
        lengths = ["--prompt-tokens", "4", "--output-tokens", "2"]
        with subprocess.Popen([*COMMAND, *args, *lengths], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "Ctrl-C" in process.stderr.readline()
            serving.until(lambda: served.metric("generation_tokens_total") > 20)
            process.send_signal(signal.SIGINT)
            out, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["tables"]["totals"][0]["completed"] > 0


def test_a_key_is_not_written_down() -> None:
    with serving.scripted(api_key="sesame") as served:
        args = ["serve", "--url", served.url, "--model", "parrot", "--requests", "1", "--prompt-tokens", "4", "--output-tokens", "2"]
        for given in (["--api-key", "sesame"], ["--api-key=sesame"]):
            result = bench(*args, *given, "--json", "-")
            assert result.returncode == 0, result.stderr
            assert "sesame" not in result.stdout
