"""A host's CPUs, threads and memory, divided among its workers."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tokenmill.cluster.division import MAX_WORKERS, WorkerPlan, Workers, divide, divide_among
from tokenmill.core.config import DEFAULT_SHARE, EngineConfig
from tokenmill.core.cpus import parse_cpus
from tokenmill.core.errors import ConfigError
from tokenmill.core.roles import Role

GIB = 2**30


def plans(workers: Workers, usable: int = 8, **settings: Any) -> list[WorkerPlan]:
    """On a host with 8 GiB of free memory, and with so many CPUs."""
    return divide(EngineConfig.from_settings(model="m", **settings), workers, set(range(usable)), 8 * GIB)


def cpus_of(found: list[WorkerPlan]) -> dict[str, tuple[int, str | None]]:
    return {plan.name: (plan.config.threads, plan.config.cpus) for plan in found}


PAIR = Workers(prefill=1, decode=1)
THREE = Workers(prefill=1, decode=2)
ALL = Workers(prefill=2, decode=2, mixed=1)


def test_a_worker_alone_gets_what_was_asked_for() -> None:
    config = EngineConfig.from_settings(model="m", threads=3, kv_cache_config={"memory_budget_gb": 4})
    [plan] = divide(config, Workers(mixed=1), {0, 1}, 0)
    assert (plan.name, plan.role) == ("mixed-0", Role.MIXED)
    assert plan.config is config


def test_workers_are_named_by_role_and_know_it() -> None:
    found = plans(ALL)
    assert [plan.name for plan in found] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0"]
    assert [plan.role for plan in found] == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.MIXED]
    for plan in found:
        assert plan.config.kv_transfer_config is not None
        assert plan.config.kv_transfer_config.worker == plan.name
        assert plan.config.role is plan.role
        assert plan.config.kv_transfer_config.connector == "shm"


def test_each_worker_gets_cpus_of_its_own() -> None:
    assert cpus_of(plans(PAIR)) == {"prefill-0": (4, "0-3"), "decode-0": (4, "4-7")}
    assert cpus_of(plans(PAIR, 2)) == {"prefill-0": (1, "0"), "decode-0": (1, "1")}


def test_what_does_not_come_out_even_goes_to_who_computes_prompts() -> None:
    assert cpus_of(plans(THREE, 4)) == {"prefill-0": (2, "0-1"), "decode-0": (1, "2"), "decode-1": (1, "3")}
    assert cpus_of(plans(THREE, 5)) == {"prefill-0": (2, "0-1"), "decode-0": (2, "2-3"), "decode-1": (1, "4")}
    more = cpus_of(plans(Workers(decode=2, mixed=1), 4))
    assert more == {"decode-0": (1, "0"), "decode-1": (1, "1"), "mixed-0": (2, "2-3")}
    assert [threads for threads, _ in cpus_of(plans(ALL, 8)).values()] == [2, 2, 1, 1, 2]


def test_with_fewer_cpus_than_workers_each_has_one_thread_wherever_the_system_puts_it() -> None:
    assert cpus_of(plans(THREE, 2)) == {"prefill-0": (1, None), "decode-0": (1, None), "decode-1": (1, None)}
    assert cpus_of(plans(PAIR, 1)) == {"prefill-0": (1, None), "decode-0": (1, None)}


def test_threads_are_those_of_the_host() -> None:
    assert cpus_of(plans(THREE, 4, threads=4)) == cpus_of(plans(THREE, 4))
    left_over = cpus_of(plans(THREE, 8, threads=4))
    assert left_over == {"prefill-0": (2, None), "decode-0": (1, None), "decode-1": (1, None)}, "the system spreads them best"
    assert cpus_of(plans(PAIR, 2, threads=6)) == {"prefill-0": (3, None), "decode-0": (3, None)}


def test_listed_cpus_are_divided_in_their_order() -> None:
    config = EngineConfig.from_settings(model="m", cpus="9,4-6")
    assert cpus_of(divide(config, PAIR, set(range(16)), GIB)) == {"prefill-0": (2, "9,4"), "decode-0": (2, "5-6")}


def test_cpus_need_not_be_numbered_without_gaps() -> None:
    config = EngineConfig.from_settings(model="m")
    assert cpus_of(divide(config, PAIR, {11, 3, 2, 7}, GIB)) == {"prefill-0": (2, "2-3"), "decode-0": (2, "7,11")}


@pytest.mark.parametrize("seed", range(200))
def test_nobody_is_without_a_thread_and_no_cpu_has_two(seed: int) -> None:
    rng = random.Random(seed)
    workers = Workers(prefill=rng.randint(1, 4), decode=rng.randint(1, 6), mixed=rng.randint(0, 3))
    usable = set(rng.sample(range(64), rng.randint(1, 40)))
    threads = rng.choice((0, 0, rng.randint(workers.total, 64)))
    found = divide(EngineConfig(model="m", threads=threads), workers, usable, GIB)
    shares = [plan.config.threads for plan in found]
    total = threads or max(len(usable), workers.total)
    assert sum(shares) == total, f"seed {seed}"
    assert max(shares) - min(shares) <= 1, f"seed {seed}"
    assert min(shares) >= 1, f"seed {seed}"
    by_role = {role: [s for plan, s in zip(found, shares, strict=True) if plan.role is role] for role in Role}
    assert min(by_role[Role.PREFILL]) >= max([*by_role[Role.MIXED], *by_role[Role.DECODE]]), f"seed {seed}"
    pinned = [parse_cpus(plan.config.cpus, plan.config.threads) for plan in found]
    if total == len(usable):
        assert sorted(cpu for own in pinned for cpu in own) == sorted(usable), f"seed {seed}"
    else:
        assert not any(pinned), f"seed {seed}"


def test_a_memory_budget_is_the_hosts() -> None:
    found = plans(THREE, kv_cache_config={"memory_budget_gb": 6, "per_request_budget_gb": 1, "compression": {"enabled": True}})
    for plan in found:
        assert plan.config.kv_cache_config.memory_budget_gb == 2
        assert plan.config.kv_cache_config.per_request_budget_gb == 1, "a request is on one worker at a time"
        assert plan.config.kv_cache_config.compression.enabled
        assert plan.config.gpu_memory_utilization is None


def test_without_a_budget_the_share_of_free_memory_is_divided() -> None:
    assert {plan.config.kv_cache_config.memory_budget_gb for plan in plans(THREE)} == {8 * DEFAULT_SHARE / 3}
    assert {plan.config.kv_cache_config.memory_budget_gb for plan in plans(PAIR, gpu_memory_utilization=0.9)} == {3.6}


def test_a_budget_that_the_host_does_not_have_is_refused_though_each_share_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"memory_budget_gb is 9\.0, but only 8\.0 GB are available: lower it"):
        plans(THREE, kv_cache_config={"memory_budget_gb": 9})
    assert plans(THREE, kv_cache_config={"memory_budget_gb": 8})


def test_each_role_has_its_scheduler_unless_one_is_asked_for() -> None:
    kinds = {plan.role: (plan.config.chosen_scheduler, plan.config.chunk, plan.config.longest_step) for plan in plans(ALL)}
    assert kinds == {
        Role.PREFILL: ("prefill_optimized", 128, None),
        Role.DECODE: ("decode_optimized", 512, 0.1),
        Role.MIXED: ("mixed", 512, None),
    }
    assert {plan.config.chosen_scheduler for plan in plans(ALL, scheduler="mixed")} == {"mixed"}
    assert {plan.config.chunk for plan in plans(ALL, chunk_size=300)} == {300}


def test_prefill_workers_draft_nothing() -> None:
    drafts = {plan.role: plan.config.speculative_config.model for plan in plans(ALL, speculative_config={"model": "small"})}
    assert drafts == {Role.PREFILL: None, Role.DECODE: "small", Role.MIXED: "small"}


def test_all_else_is_the_same_for_all() -> None:
    own = {"threads", "cpus", "gpu_memory_utilization", "kv_cache_config", "kv_transfer_config", "speculative_config"}
    settings = {"max_model_len": 99, "max_batch_size": 7, "served_name": "x", "block_manager_config": {"block_size": 16}}
    common = EngineConfig.from_settings(model="m", **settings)
    for plan in plans(ALL, **settings):
        for field in msgspec.structs.fields(EngineConfig):
            if field.name not in own:
                assert getattr(plan.config, field.name) == getattr(common, field.name), field.name


def test_the_connector_is_everybodys() -> None:
    link = {"connector": "tcp", "secret_file": "/s", "host": "10.0.0.7"}
    for plan in plans(THREE, kv_transfer_config=link):
        found = plan.config.kv_transfer_config
        assert found is not None
        assert (found.connector, found.secret_file, found.host) == ("tcp", "/s", "10.0.0.7")


def test_a_plan_reaches_its_process_as_it_is() -> None:
    for plan in plans(ALL, kv_transfer_config={"connector": "nixl", "secret_file": "/s"}):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan.config), type=EngineConfig) == plan.config


WRONG: list[tuple[dict[str, int], dict[str, Any], str]] = [
    ({"prefill": 1}, {}, r"prefill is 1, but nobody goes on from .*: add decode workers \(--decode 1\), or mixed ones instead"),
    ({"decode": 2}, {}, r"decode is 2, but nobody computes prompts .*: add prefill workers \(--prefill 1\), or .* \(--mixed 2\)"),
    ({}, {}, f"there are 0 workers, but must be between 1 and {MAX_WORKERS}"),
    ({"mixed": MAX_WORKERS + 1}, {}, f"there are {MAX_WORKERS + 1} workers"),
    ({"mixed": 3, "decode": -1}, {}, "decode is -1, but must be 0 or more"),
    (
        {"prefill": 1, "decode": 2},
        {"threads": 2},
        "threads is 2, which makes 2 threads for 3 workers, each of which needs one: raise --threads to 3, or start fewer workers",
    ),
    (
        {"prefill": 1, "decode": 2},
        {"cpus": "0-1"},
        "cpus is 0-1, which makes 2 threads for 3 workers, each of which needs one: list more CPUs, or start fewer workers",
    ),
    ({"mixed": 1}, {"kv_transfer_config": {"role": "decode"}}, "role is decode, but a worker alone is mixed: leave it out"),
    ({"mixed": 2}, {"kv_transfer_config": {"role": "both"}}, "role is both, but there are 2 workers, whose roles follow from"),
    (
        {"mixed": 2},
        {"kv_transfer_config": {"connector": "tcp", "secret_file": "/s", "port": 4100}},
        "port is 4100, but 2 workers on a host cannot all listen there: leave it out, and each takes a free one",
    ),
    (
        {"prefill": 1, "decode": 1},
        {"block_manager_config": {"enable_prefix_sharing": False}},
        "a prefill worker needs prefix sharing, .* or use mixed workers",
    ),
    (
        {"mixed": 1, "decode": 1},
        {"block_manager_config": {"prefix_sharing_strategy": "none"}},
        "a decode worker needs prefix sharing",
    ),
    ({"prefill": 1, "decode": 1}, {"enable_chunked_prefill": False}, "decode_optimized, which cuts prompts .*choose scheduler mixed"),
]


@pytest.mark.parametrize(("counts", "settings", "message"), WRONG)
def test_what_cannot_be_divided_is_told(counts: dict[str, int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        plans(Workers(**counts), **settings)
    assert told.value.param


def test_mixed_workers_can_do_without_prefix_sharing() -> None:
    assert len(plans(Workers(mixed=2), block_manager_config={"enable_prefix_sharing": False})) == 2


MODELS = [EngineConfig.from_settings(model=name, served_name=name, kv_cache_config={"memory_budget_gb": 6}) for name in ("m:1", "n")]


def test_several_models_share_cpus_and_memory_and_no_name() -> None:
    found = divide_among(MODELS, PAIR, set(range(6)), 8 * GIB)
    assert [[(plan.name, plan.config.model) for plan in each] for each in found] == [
        [("prefill-0@m:1", "m:1"), ("decode-0@m:1", "m:1")],
        [("prefill-0@n", "n"), ("decode-0@n", "n")],
    ]
    everyone = [plan for each in found for plan in each]
    assert [(plan.config.threads, plan.config.cpus) for plan in everyone] == [(2, "0-1"), (1, "2"), (2, "3-4"), (1, "5")]
    assert {plan.config.kv_cache_config.memory_budget_gb for plan in everyone} == {1.5}
    assert [plan.config.kv_transfer_config.worker for plan in everyone if plan.config.kv_transfer_config] == [p.name for p in everyone]


def test_models_with_one_worker_each_share_the_host_and_hand_nothing_over() -> None:
    found = divide_among(MODELS, Workers(mixed=1), {0, 1}, 8 * GIB)
    assert [(plan.name, plan.config.threads, plan.config.kv_transfer_config) for [plan] in found] == [
        ("mixed-0@m:1", 1, None),
        ("mixed-0@n", 1, None),
    ]
    assert divide_among(MODELS, Workers(joining=True), {0, 1}, 8 * GIB) == [[], []]


def test_several_models_want_a_thread_for_each_worker_and_no_more_workers_than_there_may_be() -> None:
    few = [msgspec.structs.replace(config, threads=3) for config in MODELS]
    with pytest.raises(ConfigError, match=r"makes 3 threads for 4 workers, .* raise --threads to 4"):
        divide_among(few, PAIR, {0, 1}, 8 * GIB)
    with pytest.raises(ConfigError, match="there are 66 workers of 2 models, but must be at most 64"):
        divide_among(MODELS, Workers(mixed=33), {0, 1}, 8 * GIB)


def test_any_roles_that_can_work_together_are_taken() -> None:
    for counts in ({"prefill": 1, "mixed": 1}, {"decode": 1, "mixed": 1}, {"mixed": 5}, {"prefill": 3, "decode": 1}):
        assert len(plans(Workers(**counts))) == sum(counts.values())
