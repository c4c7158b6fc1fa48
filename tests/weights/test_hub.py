from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import CatalogueError, ModelNotFound
from tokenmill.models.calibration import calibration_path
from tokenmill.weights.catalogue import Catalogue

COMMIT = "a" * 40


def offer(server: Any, files: dict[str, bytes]) -> None:
    tree = [{"type": "file", "path": name, "size": len(data), "oid": "b" * 40} for name, data in files.items()]
    info = {"id": "org/repo", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    server.files |= {"/": b"", "/api/models/org/repo/tree/main": json.dumps(tree).encode()}
    for path in ("/api/models/org/repo", "/api/models/org/repo/revision/main"):
        server.files[path] = json.dumps(info).encode()
    server.files[f"/api/models/org/repo/tree/{COMMIT}"] = server.files["/api/models/org/repo/tree/main"]
    for name, data in files.items():
        for revision in ("main", COMMIT):
            path = f"/org/repo/resolve/{revision}/{name}"
            server.files[path] = data
            server.headers[path] = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}


def test_a_file_is_pulled_listed_found_and_removed(tmp_path: Path, model_server: Any, said: Any) -> None:
    offer(model_server, {"sub/m.gguf": b"GGUF...", "README.md": b"-"})
    name = "hf:org/repo:sub/m.gguf"
    path = Catalogue(tmp_path).resolve(name, said)
    assert path == tmp_path / "models/hf+org--repo+sub--m.gguf/sub/m.gguf"
    assert path.read_bytes() == b"GGUF..."
    asked = len(model_server.log)
    assert Catalogue(tmp_path).resolve(name) == path
    assert len(model_server.log) == asked
    assert [(m.name, m.state, m.path) for m in Catalogue(tmp_path).models() if m.name.startswith("hf:")] == [(name, "ready", str(path))]
    Catalogue(tmp_path).remove(name)
    assert not path.exists()


@pytest.mark.parametrize("name", ["hf:org/repo:m.gguf", "hf:org/repo"])
def test_the_calibration_goes_with_its_model(tmp_path: Path, model_server: Any, said: Any, name: str) -> None:
    offer(model_server, {"m.gguf": b"GGUF..."} if name.endswith("gguf") else {"config.json": b"{}", "model.safetensors": b"s"})
    stored = calibration_path(Catalogue(tmp_path).resolve(name, said))
    stored.write_bytes(bytes(1000))
    assert Catalogue(tmp_path).resolve(name) is not None, "a calibration is no change of the model"
    assert Catalogue(tmp_path).remove(name) > 1000
    assert list((tmp_path / "models").glob("*/")) == []


def test_a_folder_has_only_what_a_model_needs(tmp_path: Path, model_server: Any, said: Any) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"s", "tokenizer.json": b"{}", "pytorch_model.bin": b"p", "README.md": b"-"}
    offer(model_server, files)
    path = Catalogue(tmp_path).resolve("hf:org/repo", said)
    assert {item.name for item in path.iterdir() if item.is_file()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "stamp.json",
    }
    (path / "model.safetensors").unlink()
    assert Catalogue(tmp_path).resolve("hf:org/repo", said) == path
    assert (path / "model.safetensors").exists()


def test_what_the_hub_lacks_is_named_with_what_it_has(tmp_path: Path, model_server: Any, said: Any) -> None:
    offer(model_server, {"a.gguf": b"a", "b.gguf": b"b"})
    with pytest.raises(
        ModelNotFound, match=r"hf:org/repo has no safetensors model: choose one of hf:org/repo:a\.gguf, hf:org/repo:b\.gguf"
    ):
        Catalogue(tmp_path).resolve("hf:org/repo", said)
    with pytest.raises(ModelNotFound, match=r"there is no such file, its \.gguf files are: a\.gguf, b\.gguf"):
        Catalogue(tmp_path).resolve("hf:org/repo:c.gguf", said)


def test_an_unreachable_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CatalogueError, match=r"http://127\.0\.0\.1:1/ cannot be reached"):
        Catalogue(tmp_path).resolve("hf:org/repo", said)
