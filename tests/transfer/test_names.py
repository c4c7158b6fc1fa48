"""Names of connectors, and what it takes to know them."""

from __future__ import annotations

import importlib
import subprocess
import sys

import numpy as np
import pytest
from fake_pools import MINE, random_bytes
from fake_workers import FINGERPRINT, SECRET

from tokenmill.core.connectors import CONNECTORS, parse_connector
from tokenmill.core.errors import ConfigError
from tokenmill.kernels.frames import KVMemory
from tokenmill.transfer import nixl
from tokenmill.transfer.connector import Options, Side
from tokenmill.transfer.names import open_door, open_reader


def test_every_connector_is_known_by_its_name():
    assert [parse_connector(name) for name in ("shm", "tcp", "nixl")] == list(CONNECTORS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nccl", "memory of GPUs"),
        ("shn", "did you mean 'shm'"),
        ("tcpp", "did you mean 'tcp'"),
        ("NIXL", "there is no such connector"),
        ("nixel", "did you mean 'nixl'"),
        ("", "there is no such connector"),
        ("mooncake", "there is no such connector"),
    ],
)
def test_what_is_no_connector_is_told_which_there_are(name, words):
    with pytest.raises(ConfigError) as told:
        parse_connector(name)
    assert repr(name) in str(told.value)
    assert words in str(told.value)
    assert "shm, tcp, nixl" in str(told.value)


def test_names_are_known_without_native_code():
    code = "import sys, tokenmill.transfer.names; print('tokenmill._native' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_nixl_says_how_it_is_installed(monkeypatch):
    """To who opens a door; a reader that gets such an address refuses it."""

    def nothing(name, load=importlib.import_module):
        if name in nixl.LIBRARIES:
            raise ImportError(name)
        return load(name)

    monkeypatch.setattr(importlib, "import_module", nothing)
    side = Side(KVMemory(random_bytes(MINE, 1), MINE), "boot", FINGERPRINT)
    options = Options(secret=SECRET)
    with pytest.raises(ConfigError, match="pip install --no-deps nixl-cu12"):
        open_door("nixl", side, options)
    one = [np.zeros(1, np.int32)] * 3
    status = open_reader(side, options).read("nixl:127.0.0.1:1", "boot", bytes(16), one, one, bytes(8))
    assert (status.outcome, status.reason) == ("refused", "address")
    assert "nixl-cu12" in status.detail


def test_nixl_reads_each_run_of_memory_once(monkeypatch):
    """Of any frames, in batches of any size: their bytes one after another are the stream."""
    rng = np.random.default_rng(3)
    content = random_bytes(MINE, 4)
    memory = KVMemory(content, MINE)
    for _ in range(200):
        numbers = [np.sort(rng.choice(MINE.n_frames, rng.integers(0, 40), replace=False)).astype(np.int32) for _ in MINE.slots]
        most = int(rng.integers(1, 20)) * MINE.piece_bytes + int(rng.integers(MINE.piece_bytes))
        batches = list(nixl._batches(MINE, numbers, most))
        assert all(batch[:, 1].sum() <= most for batch in batches)
        parts = [content[int(at) : int(at + size)] for batch in batches for at, size, _ in batch]
        np.testing.assert_array_equal(np.concatenate([*parts, np.empty(0, np.uint8)]), memory.frames(numbers).gather())
