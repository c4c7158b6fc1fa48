"""The description, and what random requests made from it get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
import serving
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tokenmill.gateway.app import build_app
from tokenmill.gateway.openapi import openapi_json


@pytest.fixture(scope="module")
def small() -> Iterator[serving.Served]:
    with serving.scripted(script={"max_model_len": 64}) as served:
        yield served


SCHEMAS = json.loads(openapi_json())["components"]["schemas"]
EXAMPLES = 60
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", POSTS)
def test_random_requests_get_the_described_answers(small: serving.Served, path: str) -> None:
    operation = schemathesis.openapi.from_url(small.url + "/openapi.json")[path]["POST"]

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck))
    def send(case: schemathesis.Case) -> None:
        case.body = servable(case.body)
        response = case.call()
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    statuses: set[int] = set()
    send()
    assert {200, 400} <= statuses


def servable(body: dict[str, Any]) -> dict[str, Any]:
    """Without what is refused whatever else the request says, which would hide the rest."""
    unserved = [name for name, about in SCHEMAS["ChatRequest"]["properties"].items() if "refused" in about.get("description", "")]
    kept = {name: value for name, value in body.items() if name not in unserved}
    if isinstance(messages := kept.get("messages"), list):
        said = [{"role": m.get("role"), "content": m.get("content") or "hello"} if isinstance(m, dict) else m for m in messages]
        kept["messages"] = said or [{"role": "user", "content": "hello"}]
    return kept | {"model": "parrot"}


def test_every_route_is_described_and_nothing_else() -> None:
    paths = json.loads(openapi_json())["paths"]
    described = {(path, method.upper()) for path, item in paths.items() for method in item}
    routes = build_app(None)._app.routes  # type: ignore[arg-type,attr-defined]  # no route needs its service before it is called
    built = {(route.path.replace(":path", ""), method) for route in routes for method in route.methods - {"HEAD"}}
    assert described == built
