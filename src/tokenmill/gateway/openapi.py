"""The OpenAPI description, made from the same structs that decode requests and encode answers."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from tokenmill import __version__
from tokenmill.gateway.errors import RESPONSES, ErrorReply
from tokenmill.gateway.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    HealthReply,
    MigrateReply,
    ModelCard,
    ModelList,
    RemoveReply,
    TokenizeReply,
    WorkerList,
)
from tokenmill.gateway.sampling import MAX_SESSION
from tokenmill.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    WorkerRequest,
)

_Struct = type[msgspec.Struct]

_POSTS: dict[str, tuple[str, _Struct, _Struct, _Struct | None]] = {
    "/v1/chat/completions": ("Answer a conversation.", ChatRequest, ChatReply, ChatChunk),
    "/v1/completions": ("Continue a prompt, or several.", CompletionRequest, CompletionReply, CompletionReply),
    "/tokenize": ("Token ids of a text or of a conversation.", TokenizeRequest, TokenizeReply, None),
    "/v1/workers/migrate": ("Have others go on with what a worker decodes.", WorkerRequest, MigrateReply, None),
    "/v1/workers/remove": ("End a worker for good; what it has goes elsewhere.", WorkerRequest, RemoveReply, None),
    "/detokenize": ("The text of token ids.", DetokenizeRequest, DetokenizeReply, None),
}
"""Path: what it does, what it takes, what it gives, and what each event of its stream is."""

_GETS: dict[str, tuple[str, _Struct | None]] = {
    "/v1/models": ("The names under which models are served.", ModelList),
    "/v1/models/{model}": ("One of them.", ModelCard),
    "/v1/workers": ("The workers that compute, and how they are.", WorkerList),
    "/health": ("200 when the engine is there and moves, else 503.", HealthReply),
    "/ready": ("200 when a request sent now would be worked on, else 503.", HealthReply),
    "/metrics": ("Prometheus metrics.", None),
    "/openapi.json": ("This description.", None),
}

_SESSION = {
    "name": "X-Session-Id",
    "in": "header",
    "description": "As prompt_cache_key, before which it counts.",
    "schema": {"type": "string", "pattern": f"^[!-~]{{1,{MAX_SESSION}}}$"},
}

_OPEN = ("/health", "/ready", "/metrics")


@functools.cache
def openapi_json() -> bytes:
    """The description as JSON."""
    structs: set[_Struct] = {ErrorReply}
    for _, takes, gives, event in _POSTS.values():
        structs |= {takes, gives, *([event] if event else [])}
    structs |= {gives for _, gives in _GETS.values() if gives is not None}
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    document = {
        "openapi": "3.1.0",
        "info": {"title": "tokenmill", "version": __version__},
        "paths": {path: {"post": _post(path)} for path in _POSTS} | {path: {"get": _get(path)} for path in _GETS},
        "components": {
            "schemas": components,
            "responses": {str(status): _error(about) for status, about in RESPONSES.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return msgspec.json.encode(document)


def _post(path: str) -> dict[str, Any]:
    about, takes, gives, event = _POSTS[path]
    content: dict[str, Any] = {"application/json": {"schema": _ref(gives)}}
    if event is not None:
        content["text/event-stream"] = {"schema": _event(event)}
    operation: dict[str, Any] = {
        "summary": about,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(takes)}}},
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(400, 401, 404, 408, 413, 415, 500, 503),
    }
    if issubclass(takes, GenerationRequest):
        operation["parameters"] = [_SESSION]
    return operation


def _event(struct: _Struct) -> dict[str, Any]:
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(struct)}
    about = f"One server-sent event: a {struct.__name__}, or an ErrorReply that ends the stream early. The last data is [DONE]."
    return {"type": "object", "description": about, "properties": {"data": data}, "required": ["data"]}


def _get(path: str) -> dict[str, Any]:
    about, gives = _GETS[path]
    kind = "text/plain" if path == "/metrics" else "application/json"
    answer = {"description": about, "content": {kind: {"schema": _ref(gives) if gives else {}}}}
    responses: dict[str, Any] = {"200": answer}
    if gives is HealthReply:
        responses["503"] = answer
    elif path not in _OPEN:
        responses |= _errors(401, 503)
    operation: dict[str, Any] = {"summary": about, "responses": responses | _errors(400)}
    if "{model}" in path:
        operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        operation["responses"] |= _errors(404)
    if path in _OPEN:
        operation["security"] = []
    return operation


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _error(about: str) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": _ref(ErrorReply)}}}


def _ref(struct: _Struct) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
