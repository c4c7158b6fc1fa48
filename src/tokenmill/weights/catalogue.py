"""From the name of a model to a checked file on this machine.

A name is a short one of `catalogue.toml`, `hf:org/repo[:file.gguf]`, or a path. A model that is not there yet is
pulled: each source in turn, until one delivers the pinned SHA-256. A second process that wants the same model waits
for the first. A pull that was stopped, even by a power cut, goes on where it was. Finding a model that is ready loads
no HTTP library and hashes nothing.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import CatalogueError, ModelNotFound
from tokenmill.weights.entries import HUB_PREFIX, Entry, known_entries, parse_hub_name
from tokenmill.weights.progress import Progress, progress_for
from tokenmill.weights.store import Slot, default_home, read_stamp, storing

if TYPE_CHECKING:
    from tokenmill.weights.pull import Puller


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model as `tokenmill models` lists it. size: bytes of the model; bytes_here: bytes of it in the cache."""

    name: str
    about: str
    licence: str
    state: Literal["ready", "partial", "absent"]
    size: int
    bytes_here: int
    path: str | None


def with_draft(config: EngineConfig) -> EngineConfig:
    """The configuration with the path of its draft model, which is pulled on first use. Raises as `resolve`."""
    speculative = config.speculative_config
    if speculative.model is None:
        return config
    found = msgspec.structs.replace(speculative, model=str(resolve(speculative.model)))
    return msgspec.structs.replace(config, speculative_config=found)


def resolve(name: str, progress: Progress | None = None) -> Path:
    """The local file or folder of a model, pulled at its first use into the default cache; see `Catalogue.resolve`."""
    return _catalogue_in(default_home()).resolve(name, progress)


class Catalogue:
    """The models known by name and those in one cache folder.

    home: the cache, `default_home()` if None. entries: what the short names mean, the data file if None.
    """

    def __init__(self, home: Path | None = None, entries: Mapping[str, Entry] | None = None) -> None:
        self._home = home or default_home()
        self._entries = known_entries() if entries is None else entries

    def resolve(self, name: str, progress: Progress | None = None) -> Path:
        """The local .gguf file or folder of a short name, an `hf:` name or a path; pulls what is not there yet.

        Raises `ModelNotFound` for a name that means nothing, `CatalogueError` when it cannot be fetched or stored.
        """
        if name in self._entries or name.startswith(HUB_PREFIX):
            return self.pull(name, progress)
        if not name:
            raise self._unknown(name)
        path = Path(name).expanduser()
        if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
            return path
        if path.exists():
            raise ModelNotFound(f"{name} is neither a .gguf file nor a folder with config.json and safetensors", param="model")
        raise self._unknown(name)

    def pull(self, name: str, progress: Progress | None = None) -> Path:
        """Make a short or `hf:` name ready; returns at once when it is. Raises as `resolve`."""
        slot, entry = self._slot(name), self._entries.get(name)
        sha256 = entry.sha256 if entry else None
        if path := slot.ready(sha256):
            return path
        progress = progress or progress_for()
        with storing(slot.folder), slot.locked(lambda: progress.say(f"{name} is being pulled by another process: waiting for it")):
            return slot.ready(sha256) or self._puller.fetch(entry, slot, progress)

    def models(self) -> list[ModelStatus]:
        """All short names, and what has been pulled from Hugging Face."""
        found = []
        for name, entry in self._entries.items():
            found.append(_status(Slot(self._home, name), entry.about, entry.licence, entry.sha256, entry.size))
        for folder in sorted((self._home / "models").glob("hf+*/")):
            if stamp := read_stamp(folder):
                slot = Slot(self._home, stamp.name)
                found.append(_status(slot, "from Hugging Face", "see its page", None, slot.bytes_used()))
        return found

    def remove(self, name: str) -> int:
        """Delete a pulled or half-pulled model; returns the bytes freed. Raises `ModelNotFound` when nothing is there."""
        slot = self._slot(name)
        if not slot.folder.is_dir():
            raise ModelNotFound(f"{name} is not in {self._home}: nothing to remove", param="model")

        def refuse() -> None:
            raise CatalogueError(f"{name} is being pulled by another process: stop that first")

        with storing(slot.folder), slot.locked(refuse):
            return slot.remove()

    @cached_property
    def _puller(self) -> Puller:
        from tokenmill.weights.pull import Puller

        return Puller()

    def _slot(self, name: str) -> Slot:
        """Where a short or `hf:` name is kept; raises `ModelNotFound` for anything else."""
        if name.startswith(HUB_PREFIX):
            parse_hub_name(name)
        elif name not in self._entries:
            if Path(name).exists():
                raise ModelNotFound(f"{name} is a path: it is used where it lies, there is nothing to pull or remove", param="model")
            raise self._unknown(name)
        return Slot(self._home, name)

    def _unknown(self, name: str) -> ModelNotFound:
        if name.endswith(".gguf") or os.sep in name:
            return ModelNotFound(f"{name}: there is no such file or folder", param="model")
        near = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        known = ", ".join(self._entries)
        return ModelNotFound(f"unknown model {name!r}: {hint}known are {known}; or hf:org/repo[:file.gguf], or a path", param="model")


def _status(slot: Slot, about: str, licence: str, sha256: str | None, size: int) -> ModelStatus:
    path, here = slot.ready(sha256), slot.bytes_used()
    state: Literal["ready", "partial", "absent"] = "ready" if path else "partial" if here else "absent"
    return ModelStatus(
        name=slot.name, about=about, licence=licence, state=state, size=size, bytes_here=here, path=str(path) if path else None
    )


@cache
def _catalogue_in(home: Path) -> Catalogue:
    """One object per cache folder and process, so that a host found unreachable is not asked again."""
    return Catalogue(home)
