"""What each worker of one host is started with: the host's CPUs and memory, divided. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from tokenmill.core.config import EngineConfig, KVTransferConfig
from tokenmill.core.cpus import parse_cpus, show_cpus
from tokenmill.core.errors import ConfigError
from tokenmill.core.roles import Role

MAX_WORKERS = 64
"""Processes with a model each. More are a slip of the finger."""

_APPETITE = (Role.PREFILL, Role.MIXED, Role.DECODE)
"""Who gets a thread more where threads do not come out even. The time that a prompt takes falls with each thread, while streams wait for
memory, of which few threads can read as much as there is."""


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """How many there are on this host, by role."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    joining: bool = False
    """Whether others come from other hosts, of any role: then these need not be complete, and may be none."""

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def roles(self) -> list[Role]:
        """Of each worker, in the order in which they are listed."""
        return [Role.PREFILL] * self.prefill + [Role.DECODE] * self.decode + [Role.MIXED] * self.mixed

    def __post_init__(self) -> None:
        for role in Role:
            if getattr(self, role) < 0:
                raise ConfigError(f"{role} is {getattr(self, role)}, but must be 0 or more workers", param=role)
        if self.joining and self.total <= MAX_WORKERS:
            return
        if not 1 <= self.total <= MAX_WORKERS:
            raise ConfigError(f"there are {self.total} workers, but must be between 1 and {MAX_WORKERS} on a host", param="mixed")
        if self.prefill and not self.decode + self.mixed:
            raise ConfigError(
                f"prefill is {self.prefill}, but nobody goes on from the prompts that prefill workers compute: add decode workers "
                "(--decode 1), or mixed ones instead (--mixed 1)",
                param="decode",
            )
        if self.decode and not self.prefill + self.mixed:
            raise ConfigError(
                f"decode is {self.decode}, but nobody computes prompts for decode workers to go on from: add prefill workers "
                f"(--prefill 1), or have mixed ones that do both (--mixed {self.decode})",
                param="prefill",
            )


class WorkerPlan(NamedTuple):
    """name: such as `decode-0`, or `decode-0@MODEL` where there are several models. config: with the worker's own share of the host, its
    role and its name."""

    name: str
    role: Role
    config: EngineConfig


def divide(config: EngineConfig, workers: Workers, cpus: Collection[int], memory: int) -> list[WorkerPlan]:
    """As `divide_among`, of one model."""
    return divide_among([config], workers, cpus, memory)[0]


def divide_among(configs: Sequence[EngineConfig], workers: Workers, cpus: Collection[int], memory: int) -> list[list[WorkerPlan]]:
    """Who is to be started on a host, for each of several models, and with what.

    configs: of each model, for all of its workers together: `threads`, `cpus` and memory are the host's, and so the same in all. Of its
    `kv_transfer_config`, if it has one, each worker gets its connector. workers: of each model. cpus: those that may be used. memory: bytes
    that are available. A worker alone gets its config as it is.

    Raises `ConfigError` for less than each worker must have, and for settings that cannot be those of several workers.
    """
    roles, host = workers.roles * len(configs), configs[0]
    if len(roles) > MAX_WORKERS:
        raise ConfigError(
            f"there are {len(roles)} workers of {len(configs)} models, but must be at most {MAX_WORKERS} on a host", param="mixed"
        )
    if not roles:
        return [[] for _ in configs]
    if len(roles) == 1 and not workers.joining:
        if host.role not in (None, Role.MIXED):
            raise ConfigError(f"kv_transfer_config: role is {host.role}, but a worker alone is mixed: leave it out", param="role")
        return [[WorkerPlan("mixed-0", Role.MIXED, host)]]
    threads, sets = _cpus(host, roles, cpus)
    memory_settings = _memory(host, len(roles), memory)
    shares: list[dict[str, object]] = [{"threads": n, "cpus": own, **memory_settings} for n, own in zip(threads, sets, strict=True)]
    each = workers.total
    return [
        _of_model(config, workers, shares[each * at : each * (at + 1)], f"@{config.name}" if len(configs) > 1 else "")
        for at, config in enumerate(configs)
    ]


def _of_model(config: EngineConfig, workers: Workers, shares: list[dict[str, object]], suffix: str) -> list[WorkerPlan]:
    """shares: of each worker, settings that are its part of the host's. suffix: of the workers' names."""
    roles = workers.roles
    linked = len(roles) > 1 or workers.joining  # else there is nobody whose frames it could read
    plans: list[WorkerPlan] = []
    for at, (role, own) in enumerate(zip(roles, shares, strict=True)):
        name = f"{role}-{roles[:at].count(role)}{suffix}"
        if linked:
            own["kv_transfer_config"] = msgspec.structs.replace(_link(config, len(roles)), role=role.value, worker=name)
        if role is Role.PREFILL:  # which gives one token of each answer: a draft model would only take memory
            own["speculative_config"] = type(config.speculative_config)()
        plans.append(WorkerPlan(name, role, msgspec.structs.replace(config, **own)))
    return plans


def _link(config: EngineConfig, count: int) -> KVTransferConfig:
    link = config.kv_transfer_config or KVTransferConfig()
    if link.role is not None:
        raise ConfigError(
            f"kv_transfer_config: role is {link.role}, but there are {count} workers, whose roles follow from their numbers: leave it out",
            param="role",
        )
    if link.port:
        raise ConfigError(
            f"kv_transfer_config: port is {link.port}, but {count} workers on a host cannot all listen there: leave it out, and each takes "
            "a free one",
            param="port",
        )
    return link


def _cpus(config: EngineConfig, roles: list[Role], usable: Collection[int]) -> tuple[list[int], list[str | None]]:
    """Threads of each worker, and the CPUs that these are kept on, if each has its own.

    Where CPUs are left over nobody is kept anywhere: the system spreads threads, and knows which CPUs are two of one core."""
    listed = parse_cpus(config.cpus, config.threads)
    asked = config.threads or len(listed)
    if 0 < asked < len(roles):
        given, more = ("cpus", "list more CPUs") if listed else ("threads", f"raise --threads to {len(roles)}")
        raise ConfigError(
            f"{given} is {config.cpus or asked}, which makes {asked} threads for {len(roles)} workers, each of which needs one: {more}, or "
            "start fewer workers",
            param=given,
        )
    total = asked or len(usable)
    each, more_for = divmod(total, len(roles))
    hungry = sorted(range(len(roles)), key=lambda at: _APPETITE.index(roles[at]))[:more_for]
    threads = [max(1, each + (at in hungry)) for at in range(len(roles))]
    free = listed or tuple(sorted(usable))
    if sum(threads) != len(free):
        return threads, [None] * len(roles)
    ends = [sum(threads[: at + 1]) for at in range(len(roles))]
    return threads, [_listed(free[end - count : end]) for end, count in zip(ends, threads, strict=True)]


def _listed(cpus: Sequence[int]) -> str:
    """In this order, in which threads get them."""
    return show_cpus(cpus) if list(cpus) == sorted(cpus) else ",".join(map(str, cpus))


def _memory(config: EngineConfig, count: int, available: int) -> dict[str, object]:
    """Equal shares: each worker must be able to hold the longest sequence, and keeps prefixes that it can be asked for again. In bytes from
    the start on: of a share of what is free, one that is started again would find less, as the others have theirs."""
    cache = config.kv_cache_config
    total = cache.memory_budget_gb
    if total is None:
        total = config.memory_share * available / 2**30
    elif total * 2**30 > available:
        free = f"{available / 2**30:.1f} GB"
        raise ConfigError(f"memory_budget_gb is {total}, but only {free} are available: lower it", param="memory_budget_gb")
    return {"kv_cache_config": msgspec.structs.replace(cache, memory_budget_gb=total / count), "gpu_memory_utilization": None}
