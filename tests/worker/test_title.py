"""What processes are called, as the system tells it."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tokenmill.core.config import EngineConfig
from tokenmill.core.messages import Failed
from tokenmill.worker import wire

LOOK = """
import sys
import msgspec
from tokenmill.core.config import EngineConfig
from tokenmill.worker.title import set_title
set_title(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
print(repr(open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode()))
print(open("/proc/self/comm").read().strip())
print("tokenmill._native" in sys.modules)
"""

LONG = "m" * 3000


@pytest.mark.parametrize(
    ("settings", "title", "comm"),
    [
        ({"kv_transfer_config": {"role": "decode", "worker": "decode-0"}}, "tokenmill: decode-0 a model", "tm-decode-0"),
        ({"kv_transfer_config": {"role": "prefill", "worker": "prefill-12"}}, "tokenmill: prefill-12 a model", "tm-prefill-12"),
        ({"kv_transfer_config": {"worker": "a-name-of-its-own"}}, "tokenmill: a-name-of-its-own a model", "tm-a-name-of-it"),
        ({"kv_transfer_config": {"role": "decode"}}, "tokenmill: engine a model", "tokenmill-engin"),
        ({}, "tokenmill: engine a model", "tokenmill-engin"),
        ({"served_name": "größer"}, "tokenmill: engine größer", "tokenmill-engin"),
    ],
)
def test_a_worker_is_listed_by_its_name_and_its_model(settings: dict[str, Any], title: str, comm: str) -> None:
    config = EngineConfig.from_settings(**{"model": "/models/m.gguf", "served_name": "a model", **settings})
    done = subprocess.run([sys.executable, "-c", LOOK], input=msgspec.json.encode(config), capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == [repr(title), comm, "False"]


WORKER = """
import sys
from tokenmill.core.errors import ConfigError
from tokenmill.worker.main import main

def build(config):
    raise ConfigError(open("/proc/self/comm").read().strip())

main(build)
"""


def test_a_worker_has_its_name_before_it_loads_anything() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-c", WORKER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        wire.send(ours, EngineConfig.from_settings(model="m", kv_transfer_config={"worker": "decode-3"}))
        answer = wire.receive(ours)
        assert answer is not None
        assert msgspec.msgpack.decode(answer, type=Failed).message == "tm-decode-3"
        assert process.wait() == 1


def test_a_name_of_any_length_harms_nobody() -> None:
    config = EngineConfig(model="m", served_name=LONG)
    done = subprocess.run([sys.executable, "-c", LOOK], input=msgspec.json.encode(config), capture_output=True, check=True)
    shown = done.stdout.decode().splitlines()[0].strip("'")
    assert f"tokenmill: engine {LONG}".startswith(shown)
    assert len(shown) > 20
