"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tokenmill.core.errors import InvalidRequest, TokenmillError
from tokenmill.gateway.body import json_response, read_json
from tokenmill.gateway.chat import answer_chat
from tokenmill.gateway.completions import answer_completion
from tokenmill.gateway.door import Door
from tokenmill.gateway.errors import ClientGone, on_client_gone, on_fault, on_http_exception, on_tokenmill_error
from tokenmill.gateway.openapi import openapi_json
from tokenmill.gateway.replies import (
    DetokenizeReply,
    HealthReply,
    MigrateReply,
    ModelCard,
    ModelList,
    RemoveReply,
    TokenizeReply,
    WorkerList,
)
from tokenmill.gateway.sampling import session
from tokenmill.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    WorkerRequest,
    refuse_unserved,
)
from tokenmill.gateway.served_model import ServedModel
from tokenmill.gateway.service import Service
from tokenmill.gateway.stream import while_connected
from tokenmill.observe.metrics import CONTENT_TYPE

T = TypeVar("T", bound=msgspec.Struct)
G = TypeVar("G", bound=GenerationRequest)
Answering: TypeAlias = Coroutine[Any, Any, Response]


def build_app(service: Service) -> ASGIApp:
    """The HTTP application over what is served."""
    routes = [
        _generation("/v1/chat/completions", service, ChatRequest, answer_chat),
        _generation("/v1/completions", service, CompletionRequest, answer_completion),
        _post("/tokenize", service, TokenizeRequest, tokenize),
        _post("/detokenize", service, DetokenizeRequest, detokenize),
        _post("/v1/workers/migrate", service, WorkerRequest, migrate_worker),
        _post("/v1/workers/remove", service, WorkerRequest, remove_worker),
        _get("/v1/workers", service, list_workers),
        _get("/v1/models", service, list_models),
        _get("/v1/models/{model:path}", service, show_model),
        _get("/health", service, health),
        _get("/ready", service, health),
        _get("/metrics", service, metrics),
        _get("/openapi.json", service, openapi),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            TokenmillError: on_tokenmill_error,
            HTTPException: on_http_exception,
            ClientGone: on_client_gone,
            Exception: on_fault,
        },
    )
    app.router.redirect_slashes = False
    return Door(app, service)


def _generation(path: str, service: Service, schema: type[G], answer: Callable[[ServedModel, G, str | None], Answering]) -> Route:
    """A route whose requests go to workers of their model, those of one session to the same."""

    def take(body: G, request: Request) -> Answering:
        return answer(service.model(body.model), body, session(body, request.headers.get("x-session-id")))

    return _taking(path, schema, take)


def _post(path: str, service: Service, schema: type[T], answer: Callable[[Service, T], Answering]) -> Route:
    return _taking(path, schema, lambda body, request: answer(service, body))


def _taking(path: str, schema: type[T], answer: Callable[[T, Request], Answering]) -> Route:
    """A route that takes a JSON body. Its work is cancelled when the client goes."""
    decoder = msgspec.json.Decoder(schema)

    async def endpoint(request: Request) -> Response:
        body = await read_json(request, decoder)
        return await while_connected(request.receive, answer(body, request))

    return Route(path, endpoint, methods=["POST"])


def _get(path: str, service: Service, answer: Callable[[Service, Request], Answering]) -> Route:
    async def endpoint(request: Request) -> Response:
        return await answer(service, request)

    return Route(path, endpoint, methods=["GET"])


async def tokenize(service: Service, request: TokenizeRequest) -> Response:
    """Token ids of a text or of a conversation."""
    model = service.model_or_only(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    refuse_unserved(request)
    if request.messages is not None:
        if request.add_special_tokens is not None:
            raise InvalidRequest("add_special_tokens has an effect on prompt only: leave it out with messages", param="add_special_tokens")
        tokens = await model.prompts.from_messages(request.messages)
    else:
        assert request.prompt is not None
        tokens = await model.prompts.from_text(request.prompt, request.add_special_tokens is not False)
    return json_response(TokenizeReply(tokens=tokens, count=len(tokens), max_model_len=model.max_model_len))


async def detokenize(service: Service, request: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens written out."""
    model = service.model_or_only(request.model)
    return json_response(DetokenizeReply(prompt=await model.prompts.to_text(request.tokens)))


async def list_models(service: Service, request: Request) -> Response:
    """Those that have been ready; 503 while none has."""
    known = [model for model in service.models if model.has_been_ready] or service.models
    return json_response(ModelList(data=[_card(service, name) for model in known for name in model.names]))


async def show_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    return json_response(_card(service, name))


async def list_workers(service: Service, request: Request) -> Response:
    return json_response(WorkerList(data=await service.workers()))


async def migrate_worker(service: Service, request: WorkerRequest) -> Response:
    """Others go on with what a worker decodes."""
    return json_response(MigrateReply(name=request.name, migrated=service.clusters.migrate(request.name)))


async def remove_worker(service: Service, request: WorkerRequest) -> Response:
    """A worker ends for good; answered when it has. What it has goes elsewhere also if the client does not wait."""
    await asyncio.shield(asyncio.create_task(service.clusters.remove(request.name)))
    return json_response(RemoveReply(name=request.name))


async def health(service: Service, request: Request) -> Response:
    """200 when a request sent now would be worked on. Answered from what is known, without asking the engine."""
    reply = HealthReply(status=service.status)
    if len(service.models) > 1:
        reply.models = {model.names[0]: model.status for model in service.models}
    return json_response(reply, 200 if reply.status == "ok" else 503)


async def metrics(service: Service, request: Request) -> Response:
    return Response(await service.render_metrics(), headers={"content-type": CONTENT_TYPE})


async def openapi(service: Service, request: Request) -> Response:
    return Response(openapi_json(), media_type="application/json")


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=service.created, max_model_len=service.model(name).max_model_len)
