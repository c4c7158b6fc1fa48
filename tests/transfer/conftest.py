"""Real peers in processes of their own, and readers for each connector."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_pools import MINE, THEIRS, pool, random_bytes
from fake_workers import FINGERPRINT, PATIENCE, PeerProcess, Us, Wire
from peer_process import Setup

from tokenmill.kernels.frames import Geometry
from tokenmill.transfer import names, nixl
from tokenmill.transfer.connector import Side

PEER = Path(__file__).with_name("peer_process.py")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Of 127.0.0.1, signed by itself; None without openssl."""
    if shutil.which("openssl") is None:
        return None
    to = tmp_path_factory.mktemp("tls") / "both.pem"
    names = "-subj /CN=peer -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 {names} -keyout {to} -out {to}.crt"
    subprocess.run(command.split(), check=True, capture_output=True)
    to.write_bytes(to.read_bytes() + to.with_name("both.pem.crt").read_bytes())
    return to


@pytest.fixture(params=["shm", "tcp", "tcp with TLS", "nixl"])
def wire(request: pytest.FixtureRequest, certificate: Path | None) -> Wire:
    connector, _, tls = request.param.partition(" with ")
    if tls and certificate is None:
        pytest.skip("needs openssl, to make a certificate")
    if connector == "nixl" and not any(map(importlib.util.find_spec, nixl.LIBRARIES)):
        pytest.skip("needs nixl-cu12, installed without its dependencies")
    return Wire(connector, certificate if tls else None)


@pytest.fixture
def start_peer(wire: Wire) -> Iterator[Callable[..., PeerProcess]]:
    """start_peer(**fields of `Setup`): a worker that has opened a door."""
    started: list[PeerProcess] = []

    def start(**fields: Any) -> PeerProcess:
        usual: dict[str, Any] = {
            "connector": wire.connector,
            "geometry": THEIRS,
            "seed": 5,
            "boot": secrets.token_hex(16),
            "fingerprint": FINGERPRINT,
            "secret": wire.secret,
            "tls": None if wire.certificate is None else str(wire.certificate),
        }
        setup = Setup(**usual | fields)
        setup.options = {"timeout": PATIENCE} | setup.options
        process = subprocess.Popen([sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        peer = PeerProcess(setup, random_bytes(setup.geometry, setup.seed), process)
        started.append(peer)
        peer.address = peer._line(msgspec.json.encode(setup).decode())
        return peer

    yield start
    for peer in started:
        peer.kill()
        for pipe in (peer.process.stdin, peer.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def make_us(wire: Wire) -> Iterator[Callable[..., Us]]:
    """make_us(geometry, fingerprint, **Options): this worker."""
    made: list[Us] = []

    def make(geometry: Geometry = MINE, fingerprint: str = FINGERPRINT, **options: Any) -> Us:
        content = random_bytes(geometry, 6)
        side = Side(pool(geometry, content), secrets.token_hex(16), fingerprint)
        us = Us(side, content, names.open_reader(side, replace(wire.reader_options(), **options)))
        made.append(us)
        return us

    yield make
    for us in made:
        us.reader.close()


@pytest.fixture
def us(make_us: Callable[..., Us]) -> Us:
    return make_us()
