"""From settings as users write them to config classes: nested mappings in, and errors that say what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import msgspec

from tokenmill.core.errors import ConfigError

_ROUTED = "which workers go together is decided for each request: leave it out, and "

_REFUSED: dict[str, str] = {
    "worker_cls": "there is one worker class: leave it out",
    "dtype": "weights keep the precision of their file: leave it out, or choose another file",
    "kv_transfer_config.target_nodes": _ROUTED + "name the decode workers to PDRouter (decode_engines), or have each join it (--join)",
    "kv_transfer_config.source_nodes": _ROUTED + "name the prefill workers to PDRouter (prefill_engines), or have each join it (--join)",
}
"""Settings that others have, by their paths."""


def drop_what_is_so_anyway(settings: dict[str, Any]) -> None:
    """Raises `ConfigError` for more than one device."""
    if settings.get("speculative_config", ...) is None:
        del settings["speculative_config"]
    if settings.get("dtype") == "auto":
        del settings["dtype"]
    parallel = settings.pop("tensor_parallel_size", 1)
    if parallel != 1:
        what = f"tensor_parallel_size is {parallel}: on a CPU threads do this work, use threads={parallel}"
        raise ConfigError(what, param="tensor_parallel_size")


T = TypeVar("T", bound=msgspec.Struct)


def convert(settings: Mapping[str, Any] | T, cls: type[T], where: str) -> T:
    """Turn a mapping into a config class.

    Unknown keys and wrong types raise `ConfigError` naming the setting and, for a key, the nearest known one.
    """
    if isinstance(settings, msgspec.Struct) and isinstance(settings, cls):
        settings = msgspec.structs.asdict(settings)  # a class does not check its values, so it is read as a dict of them
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where or cls.__name__} must be a mapping of settings, not {type(settings).__name__}", param=where or None)
    fields = {f.name: f for f in msgspec.structs.fields(cls)}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{where}.{key}" if where else str(key)
        if path in _REFUSED:
            raise ConfigError(f"{path}: {_REFUSED[path]}", param=path)
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(fields)}"
            raise ConfigError(f"unknown setting {path!r}: {hint}", param=path)
        kind = fields[key].type
        nested = _struct(kind)
        if nested is not None and (value is not None or kind is nested):
            values[key] = convert(value, nested, path)
            continue
        try:
            values[key] = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            words = ", ".join(_words(kind)) if isinstance(value, str) else ""
            why = f", but must be one of: {words}" if words else f": {error}"
            raise ConfigError(f"{path} is {value!r}{why}", param=path) from None
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where or cls.__name__}: {error}", param=where or None) from None


def _struct(kind: Any) -> type[msgspec.Struct] | None:
    """The config class that a setting of this type is, or may be."""
    return next((part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def _words(kind: Any) -> list[str]:
    """The strings that a setting of this type may be, if it is not any string."""
    found = [word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str)]
    return [*found, "a number"] if found and int in get_args(kind) else found
