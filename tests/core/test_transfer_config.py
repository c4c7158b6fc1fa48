"""Settings of workers among others, as callers write them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenmill.core.config import EngineConfig, KVTransferConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.roles import Role

TCP = {"connector": "tcp", "secret_file": "/secret"}


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.from_settings(model="m", **settings)


@pytest.mark.parametrize(
    ("role", "means", "scheduler", "chunk"),
    [
        ("prefill", Role.PREFILL, "prefill_optimized", 128),
        ("decode", Role.DECODE, "decode_optimized", 512),
        ("mixed", Role.MIXED, "mixed", 512),
        ("both", Role.MIXED, "mixed", 512),
        (None, None, "mixed", 512),
    ],
)
def test_scheduler_and_chunk_follow_from_the_role(role: Any, means: Any, scheduler: str, chunk: int) -> None:
    found = config(kv_transfer_config={"role": role})
    assert (found.role, found.chosen_scheduler, found.chunk) == (means, scheduler, chunk)
    assert (found.longest_step is not None) == (scheduler == "decode_optimized")
    assert config(kv_transfer_config={"role": role}, scheduler="prefill_optimized").chunk == 2048
    own = config(kv_transfer_config={"role": role}, scheduler="prefill_optimized", chunk_size=100)
    assert (own.chosen_scheduler, own.chunk, own.longest_step) == ("prefill_optimized", 100, None)


def test_an_engine_without_others_is_as_it_was() -> None:
    found = config()
    assert (found.kv_transfer_config, found.role, found.chosen_scheduler, found.chunk, found.longest_step) == (
        None,
        None,
        "mixed",
        512,
        None,
    )
    assert config(kv_transfer_config=None) == config(scheduler=None) == found


def test_the_longest_step_is_in_milliseconds() -> None:
    assert config(scheduler="decode_optimized").longest_step == 0.1
    assert config(scheduler="decode_optimized", max_step_ms=20).longest_step == 0.02
    assert config(kv_transfer_config={"role": "decode"}, max_step_ms=20).longest_step == 0.02


def test_a_typed_class_will_do_and_is_checked() -> None:
    given = KVTransferConfig(role="decode", **TCP)
    assert config(kv_transfer_config=given).kv_transfer_config == given
    with pytest.raises(ConfigError, match=r"kv_transfer_config\.role is 'decoder', but must be one of: prefill, decode, mixed, both"):
        config(kv_transfer_config=KVTransferConfig(role="decoder"))  # type: ignore[arg-type]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {"connector": "nccl"},
        "connector",
        "connector is 'nccl': it moves memory of GPUs, and KV is in that of the CPU; there are shm, tcp, nixl",
    ),
    ({"connector": "tpc"}, "connector", "connector is 'tpc': did you mean 'tcp'"),
    ({"connector": 5}, "kv_transfer_config.connector", "kv_transfer_config.connector is 5"),
    ({"roll": "decode"}, "kv_transfer_config.roll", "unknown setting 'kv_transfer_config.roll': did you mean 'role'"),
    ({"role": "decoder"}, "kv_transfer_config.role", "but must be one of: prefill, decode, mixed, both"),
    (
        {"role": "prefill", "target_nodes": ["10.0.0.7:4100"]},
        "kv_transfer_config.target_nodes",
        r"target_nodes: which workers go together is decided for each request: leave it out, and name the decode workers to PDRouter "
        r"\(decode_engines\), or have each join it \(--join\)",
    ),
    (
        {"role": "decode", "source_nodes": []},
        "kv_transfer_config.source_nodes",
        r"source_nodes: .* name the prefill workers to PDRouter \(prefill_engines\)",
    ),
    ({"connector": "tcp"}, "secret_file", "connector tcp needs secret_file, a file with at least 16 random bytes .*, or choose shm"),
    ({"connector": "nixl"}, "secret_file", "connector nixl needs secret_file"),
    ({"secret_file": "/s"}, "secret_file", "secret_file is for connectors tcp and nixl, and shm, .* has no use for it"),
    ({"host": "0.0.0.0"}, "host", "host is for connectors tcp and nixl"),
    ({"port": 1}, "port", "port is for connectors tcp and nixl"),
    ({"advertise": "a"}, "advertise", "advertise is for connectors tcp and nixl"),
    ({"tls_ca": "a"}, "tls_ca", "tls_ca is for connectors tcp and nixl"),
    ({**TCP, "port": 65536}, "port", r"port is 65536, but must be between 0 \(any\) and 65535"),
    ({**TCP, "port": -1}, "port", "port is -1"),
    ({**TCP, "tls_cert": "a"}, "tls_key", "TLS needs tls_cert, tls_key and tls_ca, and there is no tls_key and no tls_ca"),
    ({**TCP, "tls_key": "a", "tls_ca": "b"}, "tls_cert", "and there is no tls_cert: give all three or none"),
]


@pytest.mark.parametrize(("given", "param", "message"), WRONG)
def test_what_is_wrong_is_told(given: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        config(kv_transfer_config=given)
    assert told.value.param == param


@pytest.mark.parametrize("given", ["tcp", 5, ["tcp"]])
def test_what_is_no_mapping_is_told(given: Any) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_config must be a mapping of settings, not"):
        config(kv_transfer_config=given)


def test_a_setting_that_may_not_be_none_is_no_mapping_either() -> None:
    with pytest.raises(ConfigError, match="kv_cache_config must be a mapping of settings, not NoneType"):
        config(kv_cache_config=None)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("sharing", [{"enable_prefix_sharing": False}, {"prefix_sharing_strategy": "none"}])
def test_who_hands_over_shares_prefixes(role: str, sharing: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"a {role} worker needs prefix sharing"):
        config(kv_transfer_config={"role": role}, block_manager_config=sharing)
    assert config(kv_transfer_config={"role": "mixed"}, block_manager_config=sharing)


def test_all_of_it_goes_through_a_stream() -> None:
    for link in (None, {}, {"role": "both", "worker": "mixed-1", **TCP, "tls_cert": "a", "tls_key": "b", "tls_ca": "c", "port": 9}):
        made = config(kv_transfer_config=link, scheduler="decode_optimized", max_step_ms=5)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=EngineConfig) == made
