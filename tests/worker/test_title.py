"""What processes are called, as the system tells it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import nurseries
import pytest

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError

LOOK = """
import sys
import msgspec
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
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
from tokenmill.core.errors import ConfigError
from tokenmill.worker.main import main

def tell(config):
    raise ConfigError(open("/proc/self/comm").read().strip())

main(lambda config: tell)
"""


async def test_a_worker_has_its_name_before_it_builds_anything() -> None:
    config = EngineConfig.from_settings(model="m", kv_transfer_config={"worker": "decode-3"})
    async with nurseries.open_ward(config, [sys.executable, "-c", WORKER]) as ward:
        with pytest.raises(ConfigError, match="tm-decode-3"):
            await ward.loaded()


def test_a_name_of_any_length_harms_nobody() -> None:
    config = EngineConfig(model="m", served_name=LONG)
    done = subprocess.run([sys.executable, "-c", LOOK], input=msgspec.json.encode(config), capture_output=True, check=True)
    shown = done.stdout.decode().splitlines()[0].strip("'")
    assert f"tokenmill: engine {LONG}".startswith(shown)
    assert len(shown) > 20
