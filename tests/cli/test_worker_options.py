"""Options of several workers: what they become, and what is said about those that make no sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli import options
from tokenmill.cluster.division import Workers
from tokenmill.cluster.health import HealthPolicy
from tokenmill.cluster.router import RouterPolicy
from tokenmill.cluster.strategies import STRATEGIES
from tokenmill.core.config import EngineConfig
from tokenmill.core.connectors import CONNECTORS
from tokenmill.core.errors import ConfigError

ONE = Workers(mixed=1)
PAIR = Workers(prefill=1, decode=1)


def test_without_a_number_there_is_one_worker() -> None:
    assert options.workers(0, 0, 0) == ONE
    assert options.workers(0, 0, 3) == Workers(mixed=3)
    assert options.workers(1, 2, 0) == Workers(prefill=1, decode=2)
    assert options.workers(1, 0, 1) == Workers(prefill=1, mixed=1)


@pytest.mark.parametrize(("numbers", "message"), [((1, 0, 0), r"add decode workers \(--decode 1\)"), ((0, 2, 0), r"\(--prefill 1\)")])
def test_half_of_a_pair_is_of_no_use(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.workers(*numbers)


@pytest.mark.parametrize(("connector", "secret_file"), [(None, None), ("shm", None), ("tcp", "/secret"), ("nixl", "/secret")])
def test_a_connector_becomes_settings(connector: str | None, secret_file: str | None) -> None:
    config = EngineConfig.from_settings(model="m", **options.transfer(PAIR, connector, secret_file))
    found = config.kv_transfer_config
    assert (found.connector, found.secret_file) == (connector, secret_file) if found else connector is None


def test_a_store_becomes_settings() -> None:
    assert options.store(None, None, None, None) == options.store("none", None, None, None) == {}
    for given, memory_gb, folder_gb, ttl in (
        (("embedded", None, 3.0, 60), 3.0, 16.0, 60),
        (("none", "/f", 3.0, None), 1.0, 3.0, 3600),
        (("embedded", "/f", 3.0, None), 3.0, 16.0, 3600),
    ):
        found = EngineConfig.from_settings(model="m", **options.store(*given)).kv_store_config
        assert found is not None
        assert (found.memory_gb, found.folder_gb, found.ttl, found.folder) == (memory_gb, folder_gb, ttl, given[1])


def test_strategy_and_interval_become_policies() -> None:
    assert options.routing(ONE, None, None) == options.routing(PAIR, None, None) == (RouterPolicy(), HealthPolicy())
    router, health = options.routing(PAIR, "prefix_aware", 2.5)
    assert (router.routing_strategy, health.health_check_interval) == ("prefix_aware", 2.5)


WRONG: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("transfer", (ONE, "shm", None), "--connector", "--connector is for several workers of a model, and there is one: leave it out, or"),
    ("transfer", (ONE, None, "/s"), "--secret-file", "--secret-file is for several workers"),
    ("transfer", (PAIR, "nccl", None), "connector", "it moves memory of GPUs, .*; there are shm, tcp, nixl"),
    ("transfer", (PAIR, "sham", None), "connector", "did you mean 'shm'"),
    ("transfer", (PAIR, None, "/s"), "--secret-file", "--secret-file is for --connector tcp or nixl: leave it out, or choose one of them"),
    ("transfer", (PAIR, "shm", "/s"), "--secret-file", "--connector shm does not leave the host and has no use for --secret-file"),
    ("transfer", (PAIR, "tcp", None), "--secret-file", "--connector tcp needs --secret-file, a file with at least 16 random bytes"),
    ("store", (None, None, 2.0, None), "--kv-store-gb", "--kv-store-gb is for a KV store: leave it out, or choose one"),
    ("store", ("none", None, None, 60), "--kv-store-ttl", "--kv-store-ttl is for a KV store"),
    ("transfer", (PAIR, "nixl", None), "--secret-file", "--connector nixl needs --secret-file"),
    ("routing", (ONE, "round_robin", None), "--routing-strategy", "--routing-strategy is for several workers"),
    ("routing", (ONE, None, 5.0), "--health-check-interval", "--health-check-interval is for several workers"),
    (
        "routing",
        (PAIR, "fastest", None),
        "--routing-strategy",
        "--routing-strategy is 'fastest', but must be min_decode_queue, least_tokens, prefix_aware, power_of_two or round_robin",
    ),
    ("routing", (PAIR, None, 0.0), "--health-check-interval", "is 0, but must be above 0 and at most 3600 seconds"),
    ("routing", (PAIR, None, float("nan")), "--health-check-interval", "is nan, but must be above 0"),
    ("routing", (PAIR, None, float("inf")), "--health-check-interval", "is inf, but must be above 0"),
]


@pytest.mark.parametrize(("function", "given", "param", "message"), WRONG)
def test_what_makes_no_sense_is_told(function: str, given: tuple[Any, ...], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        getattr(options, function)(*given)
    assert told.value.param == param


def test_what_is_of_one_model_is_refused_for_several() -> None:
    options.only_of_one(["a"], served_model_name=["x", "y"], draft_model="b")
    options.only_of_one(["a", "b"], served_model_name=None, draft_model=None)
    with pytest.raises(ConfigError, match=r"--served-model-name is for one model, and there are 2 \(a, b\): leave it out, or") as told:
        options.only_of_one(["a", "b"], served_model_name=["x"])
    assert told.value.param == "--served-model-name"
    with pytest.raises(ConfigError, match="model 'a' is given twice"):
        options.only_of_one(["a", "b", "a"])


def test_models_are_called_what_was_typed_or_what_their_files_are_called() -> None:
    paths = [Path("/cache/smollm2.gguf"), Path("/x/b.gguf")]
    assert options.served_names(["smollm2:135m", "/x/b.gguf"], paths, []) == [["smollm2:135m"], ["b"]]
    assert options.served_names(["/x/b.gguf"], paths[1:], ["one", "two"]) == [["one", "two"]]
    with pytest.raises(ConfigError, match=r"/x/b.gguf and /y/b.gguf would both be called 'b': rename one"):
        options.served_names(["/x/b.gguf", "/y/b.gguf"], [Path("/x/b.gguf"), Path("/y/b.gguf")], [])


def test_the_strategies_that_are_named_are_those_that_there_are() -> None:
    assert list(STRATEGIES) == list(options.STRATEGIES)


def test_options_are_read_from_a_command_line_and_explained_in_its_help() -> None:
    app = typer.Typer()

    @app.command()
    def command(
        prefill: options.Prefill = 0,
        decode: options.Decode = 0,
        mixed: options.Mixed = 0,
        connector: options.Link = None,
        secret_file: options.SecretFile = None,
        routing_strategy: options.Strategy = None,
        health_check_interval: options.HealthCheckInterval = None,
    ) -> None:
        chosen = options.workers(prefill, decode, mixed)
        print(chosen, options.transfer(chosen, connector, secret_file), *options.routing(chosen, routing_strategy, health_check_interval))

    run = CliRunner().invoke
    line = "--prefill 1 --decode 2 --connector tcp --secret-file /s --routing-strategy round_robin --health-check-interval 2"
    out = run(app, line.split()).output
    for part in ("prefill=1, decode=2, mixed=0", "'tcp'", "'/s'", "round_robin", "health_check_interval=2.0"):
        assert part in out
    assert run(app, ["--prefill", "-1"]).exit_code == 2
    shown = " ".join(run(app, ["--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output.split())
    for part in ("--prefill", "--decode", "--mixed", "--connector", "--secret-file", *CONNECTORS, *STRATEGIES):
        assert part in shown


def test_who_asks_for_one_worker_loads_no_native_code() -> None:
    code = (
        "import sys; from tokenmill.cli import options; print('tokenmill.cluster' in sys.modules); w = options.workers(1, 1, 0); "
        "options.transfer(w, 'shm', None); options.routing(w, None, None); "
        "print('tokenmill._native' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nFalse False\n"
