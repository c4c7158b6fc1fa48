from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_blocks import entries, entry, key, keys, room, same
from store_servers import LONG, until

from tokenmill.core.errors import ConfigError
from tokenmill.transfer.store.breaker import Backoff
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.disk import DiskPolicy, DiskStore
from tokenmill.transfer.store.entry import flaw

ENTRY = 1096
HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(folder: Path, counts: Counts) -> DiskStore:
    return DiskStore(folder, counts)


def file_of(folder: Path, number: int) -> Path:
    name = key(number).hex()
    return folder / name[:2] / f"{name}.kv"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


def used(folder: Path, number: int, seconds_ago: float) -> None:
    when = time.time() - seconds_ago
    os.utime(file_of(folder, number), (when, when))


def test_what_was_put_is_found_and_comes_back(store: DiskStore, counts: Counts) -> None:
    stored = entries(5)
    assert (store.find(keys(5)), store.get(keys(5), room())) == (0, [])
    assert store.put(stored) == [True] * 5
    assert store.find(keys(5)) == 5
    assert same(store.get(keys(5), room()), stored)
    assert counts[Count.DISK_HITS] == 5


def test_only_what_follows_without_a_gap_and_fits_is_found(store: DiskStore) -> None:
    stored = entries(6)
    store.put([*stored[:3], *stored[4:]])
    assert store.find(keys(6)) == 3
    assert same(store.get(keys(6), room()), stored[:3])
    assert same(store.get(keys(6)[4:], room(2 * ENTRY - 1)), stored[4:5])
    assert same(store.get(keys(6)[4:], room(2 * ENTRY)), stored[4:]), "what did not fit has gone"


def test_it_outlives_its_process(store: DiskStore, folder: Path) -> None:
    store.put(entries(3))
    store.close()
    assert same(DiskStore(folder, Counts()).get(keys(3), room()), entries(3))


def test_nobody_else_may_read_it(store: DiskStore, folder: Path) -> None:
    store.put(entries(1))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder, 0).parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(folder, 0).stat().st_mode) == 0o600


def test_what_is_there_is_not_written_again(store: DiskStore, folder: Path) -> None:
    store.put(entries(1))
    used(folder, 0, 1000)
    before = file_of(folder, 0).stat()
    assert store.put([(key(0), b"another")]) == [True]
    after = file_of(folder, 0).stat()
    assert after.st_ino == before.st_ino
    assert after.st_mtime > before.st_mtime + 900, "it was not used"
    assert same(store.get(keys(1), room()), entries(1))


def test_what_is_discarded_can_be_put_anew(store: DiskStore) -> None:
    store.put(entries(2))
    store.discard([*keys(1), key(9)])
    assert store.find(keys(2)) == 0
    store.put(entries(2))
    assert store.find(keys(2)) == 2


@pytest.mark.parametrize("damage", ["cut", "longer", "changed", "empty", "other block", "not an entry"])
def test_a_damaged_file_is_a_miss_and_goes(store: DiskStore, folder: Path, counts: Counts, damage: str) -> None:
    store.put(entries(3))
    path = file_of(folder, 1)
    data = bytearray(path.read_bytes())
    content = {
        "cut": data[:-1],
        "longer": data + b"x",
        "changed": data[:500] + bytes((data[500] ^ 1,)) + data[501:],
        "empty": b"",
        "other block": entry(2),
        "not an entry": bytes(len(data)),
    }[damage]
    path.write_bytes(content)
    assert same(store.get(keys(3), room()), entries(1))
    assert counts[Count.DISK_FLAWED] == 1
    assert not path.exists()
    assert store.put(entries(3)) == [True] * 3
    assert same(store.get(keys(3), room()), entries(3))


def test_things_that_have_an_entrys_name_are_misses_and_stop_nobody(store: DiskStore, folder: Path, tmp_path: Path) -> None:
    store.put(entries(6))
    outside = tmp_path / "outside"
    outside.write_bytes(entry(2))
    for number in range(1, 6):
        file_of(folder, number).unlink()
    os.mkfifo(file_of(folder, 1))
    file_of(folder, 2).symlink_to(outside)
    file_of(folder, 3).mkdir()
    shutil.rmtree(file_of(folder, 4).parent)
    file_of(folder, 4).parent.write_bytes(b"a file where a folder should be")
    for number in range(1, 6):
        assert store.get([key(number)], room()) == []
        store.put([(key(number), entry(number))])
    assert same(store.get(keys(1), room()), entries(1))
    assert outside.read_bytes() == entry(2)
    DiskStore(folder, Counts(), DiskPolicy(limit=ENTRY))


def test_what_others_left_in_the_folder_is_neither_counted_nor_touched(folder: Path, counts: Counts) -> None:
    for name in ["note.txt", "ab/note.txt", "ab/" + "0" * 31 + ".kv", "ab/" + "0" * 33 + ".kv", "abc/" + "0" * 32 + ".kv"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(100_000))
    others = files(folder)
    store = DiskStore(folder, counts, DiskPolicy(limit=20 * ENTRY))
    assert store.put(entries(10)) == [True] * 10
    assert store.find(keys(10)) == 10
    assert set(others) <= set(files(folder))
    assert counts[Count.DISK_EVICTED] == 0


def test_what_a_process_began_and_left_goes_after_an_hour(folder: Path) -> None:
    store = DiskStore(folder, Counts())
    store.put(entries(1))
    parts = [file_of(folder, 0).parent / f"{'0' * 32}.{number}.1.part" for number in range(2)]
    for part in parts:
        part.write_bytes(b"half an ent")
    os.utime(parts[0], (time.time() - 4000,) * 2)
    DiskStore(folder, Counts())
    assert [part.exists() for part in parts] == [False, True]
    assert file_of(folder, 0).exists()


def test_its_size_is_held_and_what_was_used_longest_ago_goes(folder: Path, counts: Counts) -> None:
    limit = 100 * ENTRY
    store = DiskStore(folder, counts, DiskPolicy(limit=limit))
    for number, pair in enumerate(entries(300)):
        assert store.put([pair]) == [True]
        used(folder, number, 10_000 - number)
        assert size(folder) <= limit, number
        assert store.get([key(0)], room()), "the one that is always used has gone"
    left = [number for number in range(300) if file_of(folder, number).exists()]
    assert left == [0, *range(left[1], 300)]
    assert len(left) > 80
    assert counts[Count.DISK_EVICTED] == 300 - len(left)


def test_a_smaller_limit_holds_from_the_start(folder: Path) -> None:
    DiskStore(folder, Counts()).put(entries(50))
    DiskStore(folder, Counts(), DiskPolicy(limit=10 * ENTRY))
    assert 8 * ENTRY <= size(folder) <= 10 * ENTRY


def test_an_entry_longer_than_the_limit_is_not_kept(folder: Path, counts: Counts) -> None:
    store = DiskStore(folder, counts, DiskPolicy(limit=5000))
    assert store.put([(key(0), bytes(5001)), *entries(1)[:0], (key(1), entry(1))]) == [False, True]
    assert counts[Count.DISK_OVERSIZED] == 1
    assert len(files(folder)) == 1


def test_a_folder_that_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for wrong in (tmp_path / "file", tmp_path / "file" / "kv"):
        with pytest.raises(ConfigError, match=str(wrong)):
            DiskStore(wrong, Counts())


def test_a_folder_that_vanishes_is_made_again(store: DiskStore, folder: Path) -> None:
    store.put(entries(2))
    shutil.rmtree(folder)
    assert store.get(keys(2), room()) == []
    assert store.put(entries(2)) == [True, True]
    assert same(store.get(keys(2), room()), entries(2))


def own_mounts(script: str, *arguments: str) -> None:
    """Run a test's script, as Python, where it may mount what it likes."""
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let its users mount anything")
    subprocess.run([*command, sys.executable, "-c", script, *arguments], check=True, timeout=LONG, cwd=HERE)


def test_a_full_disk_refuses_and_loses_nothing_and_then_has_room_again(tmp_path: Path) -> None:
    own_mounts(
        """
import subprocess, sys
from pathlib import Path
from store_blocks import entries, keys, key, room, same
from store_servers import until
from tokenmill.transfer.store.breaker import Backoff
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.disk import DiskPolicy, DiskStore
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=True)
counts = Counts()
store = DiskStore(folder, counts, DiskPolicy(limit=900_000, backoff=Backoff(first=0.01, longest=0.01)))
(folder / "others").write_bytes(bytes(600_000))
stored = entries(40, 20_000)
kept = []
for pair in stored:
    until(lambda: store._keeping.remaining == 0)
    kept.append(store.put([pair]) == [True])
assert 10 < kept.index(False) < 25, kept
assert kept.count(True) > 25, kept
assert 0 < counts[Count.DISK_FAILURES] < 8, counts.read()
assert counts[Count.DISK_EVICTED] > 5
assert not [path for path in folder.rglob("*.part")]
for number, pair in enumerate(stored):
    got = store.get([key(number)], room())
    assert got == [] or same(got, [pair])
assert counts[Count.DISK_FLAWED] == 0
""",
        str(tmp_path),
    )


def test_a_folder_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    own_mounts(
        """
import logging, subprocess, sys
from pathlib import Path
from store_blocks import entries, keys, key, room, same
from tokenmill.transfer.store.breaker import Backoff
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.disk import DiskPolicy, DiskStore
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
DiskStore(folder, Counts()).put(entries(3))
(folder / key(2).hex()[:2] / (key(2).hex() + ".kv")).write_bytes(b"damaged")
subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
said = []
handler = logging.Handler()
handler.emit = said.append
logging.getLogger("tokenmill").addHandler(handler)
counts = Counts()
store = DiskStore(folder, counts, DiskPolicy(limit=2000, backoff=Backoff(first=1000)))
assert same(store.get(keys(3), room()), entries(2))
assert store.put(entries(3)) == [True, True, True]
assert store.put([(key(7), b"x")]) == [False]
assert store.put([(key(8), b"x")]) == [False]
assert (counts[Count.DISK_FAILURES], counts[Count.DISK_REFUSED], len(said)) == (1, 1, 1), counts.read()
store.discard(keys(2))
assert same(store.get(keys(3), room()), entries(2))
""",
        str(tmp_path),
    )


WRITER = """
import random, sys
from pathlib import Path
from store_blocks import entry, key, room
from tokenmill.transfer.store.counts import Count, Counts
from tokenmill.transfer.store.disk import DiskPolicy, DiskStore
folder, seed, rounds, limit = Path(sys.argv[1]), *map(int, sys.argv[2:])
source, counts = random.Random(seed), Counts()
store = DiskStore(folder, counts, DiskPolicy(limit=limit))
space = room()
for _ in range(rounds) if rounds else iter(int, 1):
    number = source.randrange(60)
    if source.random() < 0.5:
        store.put([(key(number), entry(number, 5000 + 100 * number))])
    else:
        for got in store.get([key(number)], space):
            assert bytes(got) == entry(number, 5000 + 100 * number)
    print(end=".", flush=True)
assert counts[Count.DISK_FLAWED] == counts[Count.DISK_FAILURES] == 0, counts.read()
"""


def test_processes_share_a_folder_and_its_limit(folder: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    limit = 200_000
    command = [sys.executable, "-c", WRITER, str(folder)]
    running = [subprocess.Popen([*command, str(seed + n), "400", str(limit)], cwd=HERE, stdout=subprocess.DEVNULL) for n in range(3)]
    assert [process.wait(LONG) for process in running] == [0, 0, 0]
    assert size(folder) <= limit + 3 * max(limit // 16, 11_096)
    assert all(flaw(bytes.fromhex(path.stem), path.read_bytes()) is None for path in files(folder))


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_taken_for_an_entry(folder: Path) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    source = random.Random(seed)
    for turn in range(4):
        command = [sys.executable, "-c", WRITER, str(folder), str(seed + turn), "0", "200000"]
        with subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.read(10)
            time.sleep(source.random() * 0.05)
            process.send_signal(signal.SIGKILL)
    found = [path for path in files(folder) if path.suffix == ".kv"]
    assert found
    assert all(flaw(bytes.fromhex(path.stem), path.read_bytes()) is None for path in found)


def test_a_disk_that_failed_is_tried_again_later(folder: Path, counts: Counts) -> None:
    store = DiskStore(folder, counts, DiskPolicy(backoff=Backoff(first=0.02, longest=0.02)))
    (folder / key(0).hex()[:2]).write_bytes(b"a file where a folder should be")
    assert store.put(entries(1)) == [False]
    (folder / key(0).hex()[:2]).unlink()
    until(lambda: store.put(entries(1)) == [True])
    assert counts[Count.DISK_FAILURES] == 1
