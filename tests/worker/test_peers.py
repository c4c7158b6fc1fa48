"""From settings to how a worker reaches others: the files that they name."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.config import KVTransferConfig
from tokenmill.core.errors import ConfigError
from tokenmill.transfer.connector import Options
from tokenmill.worker.peers import connector_options

SECRET = "0123456789abcdef" * 4


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_text(SECRET + "\n")
    return str(tmp_path / "secret")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    key, cert = (tmp_path_factory.mktemp("tls") / name for name in ("key.pem", "cert.pem"))
    names = "-subj /CN=peer -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 {names} -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(cert)}


def options(secret: str, **settings: Any) -> Options:
    return connector_options(KVTransferConfig(connector="tcp", secret_file=secret, **settings))


def test_shm_needs_nothing() -> None:
    assert connector_options(KVTransferConfig(role="decode")) == Options()


def test_settings_and_the_files_secret_become_options(secret: str) -> None:
    found = options(secret, host="0.0.0.0", port=4100, advertise="10.0.0.7")
    assert found == Options(host="0.0.0.0", port=4100, advertise="10.0.0.7", secret=SECRET.encode())


def test_a_secret_that_is_not_there_or_too_short_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret_file .*nowhere cannot be read: No such file"):
        options(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        options(str(tmp_path))
    (tmp_path / "short").write_text("0123456789abcde" + "\n" * 20)
    with pytest.raises(ConfigError, match="has 15 bytes, but must have at least 16"):
        options(str(tmp_path / "short"))


def test_both_sides_speak_tls_and_a_stranger_is_seen_through(secret: str, tls: dict[str, str], tmp_path: Path) -> None:
    found = options(secret, **tls)
    assert found.door_tls is not None
    assert found.reader_tls is not None
    assert _shake(found.reader_tls, found.door_tls)
    stranger = tmp_path / "stranger.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", f"{stranger}.key", "-out", str(stranger)], check=True, capture_output=True)
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    other.load_cert_chain(stranger, f"{stranger}.key")
    with pytest.raises(ssl.SSLCertVerificationError):
        _shake(found.reader_tls, other)


def _shake(reader: ssl.SSLContext, door: ssl.SSLContext) -> bool:
    """Over memory: whether both have finished their handshake. Raises what the reader says."""
    to_door, to_reader = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = reader.wrap_bio(to_reader, to_door, server_hostname="127.0.0.1")
    server = door.wrap_bio(to_door, to_reader, server_side=True)
    done = set()
    for _ in range(10):
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    return done == {client, server}


@pytest.mark.parametrize("broken", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("how", ["missing", "garbage"])
def test_files_of_tls_that_are_none_are_told(secret: str, tls: dict[str, str], tmp_path: Path, broken: str, how: str) -> None:
    path = tmp_path / "file.pem"
    if how == "garbage":
        path.write_text("no certificate\n")
    with pytest.raises(ConfigError, match=f"{'tls_ca' if broken == 'tls_ca' else 'tls_cert'} .*file.pem.* cannot be used: ") as told:
        options(secret, **{**tls, broken: str(path)})
    assert told.value.param == ("tls_ca" if broken == "tls_ca" else "tls_cert")


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(secret: str, tls: dict[str, str], tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-aes256", "-in", tls["tls_key"], "-out", str(locked), "-passout", "pass:1234"]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="cannot be used: "):
        options(secret, **{**tls, "tls_key": str(locked)})
