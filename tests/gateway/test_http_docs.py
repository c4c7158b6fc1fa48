"""docs/http-api.md names everything that there is."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import msgspec
import pytest
import serving

from tokenmill.core import errors
from tokenmill.gateway import openapi, schemas

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))
SCHEMAS = [schemas.ChatRequest, schemas.CompletionRequest, schemas.Message, schemas.StreamOptions]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_request_field_is_documented(schema: type[msgspec.Struct]) -> None:
    assert {field.encode_name for field in msgspec.structs.fields(schema)} <= NAMED | {"content", "role"}


def test_every_route_is_documented() -> None:
    for path, item in msgspec.json.decode(openapi.openapi_json())["paths"].items():
        for method in item:
            assert f"{method.upper()} {path}" in NAMED


def test_every_error_code_of_a_request_is_documented() -> None:
    def tree(kind: type[errors.TokenmillError]) -> list[type[errors.TokenmillError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]

    for kind in tree(errors.TokenmillError):
        if kind is not errors.ConfigError and (kind.status < 500 or kind.status == 503):
            assert kind.code is None or kind.code in NAMED


def test_every_metric_is_documented(parrot: serving.Served, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"model": "parrot", "prompt": "a"})
    names = set(re.findall(r"^# TYPE tokenmill:(\S+) ", http.get("/metrics").text, re.MULTILINE))
    assert len(names) > 10
    assert {name for name in names if not name.endswith("_created")} <= NAMED
