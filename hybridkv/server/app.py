"""The routes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from hybridkv import __version__
from hybridkv.server.answering import answer
from hybridkv.server.anthropic_answer import MessageFormat
from hybridkv.server.anthropic_request import MessageCall, read_count, read_message_request
from hybridkv.server.fields import Fields, parse_object
from hybridkv.server.guard import Guard
from hybridkv.server.openai_chat import ChatCall, ChatFormat, read_chat
from hybridkv.server.openai_completions import CompletionCall, CompletionFormat, read_completion
from hybridkv.server.problems import ApiError
from hybridkv.server.service import Service
from hybridkv.server.tokens import read_detokenize, read_tokenize


def make_app(service: Service) -> ASGIApp:
    """The server as an ASGI application."""

    async def chat(request: Request) -> Any:
        call: ChatCall = await service.work(_read, read_chat, await request.body(), service)
        _record(request, call.model)
        return await answer(request, service, call.job, ChatFormat(call, service), call.options.stream)

    async def completions(request: Request) -> Any:
        call: CompletionCall = await service.work(_read, read_completion, await request.body(), service)
        _record(request, call.model)
        return await answer(request, service, call.job, CompletionFormat(call, service), call.options.stream)

    async def messages(request: Request) -> Any:
        call: MessageCall = await service.work(_read, read_message_request, await request.body(), service)
        _record(request, call.model)
        return await answer(request, service, call.job, MessageFormat(call), call.stream)

    async def count_tokens(request: Request) -> Response:
        return JSONResponse(await service.work(_read, read_count, await request.body(), service))

    async def models(request: Request) -> Response:
        names = service.names
        found = {"object": "list", "data": [_model(service, name) for name in names], "has_more": False}
        return JSONResponse(found | {"first_id": names[0], "last_id": names[-1]})

    async def model(request: Request) -> Response:
        return JSONResponse(_model(service, service.model_name(request.path_params["id"])))

    async def tokenize(request: Request) -> Response:
        return JSONResponse(await service.work(_read, read_tokenize, await request.body(), service))

    async def detokenize(request: Request) -> Response:
        return JSONResponse(await service.work(_read, read_detokenize, await request.body(), service))

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        status = service.status
        if status == "ok":
            return JSONResponse({"status": "ok"})
        said = {"message": service.fatal or f"the server is {status}", "type": "server_error", "param": None}
        return JSONResponse({"status": status, "error": said | {"code": None}}, 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def root(request: Request) -> Response:
        return PlainTextResponse(f"hybridkv {__version__}\n")

    async def responses(request: Request) -> Response:
        raise ApiError(404, "the Responses API is not served yet; use /v1/chat/completions or /v1/messages")

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", ready),
        Route("/ready", ready),
        Route("/live", live),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/", root),
    ]
    known = frozenset(route.path.replace("{id:path}", "{id}") for route in routes)
    return Guard(Router(routes, redirect_slashes=False), service, known)


def _read(read: Any, raw: bytes, service: Service) -> Any:
    """On a worker thread: JSON, then all that a route checks."""
    asked: Fields = parse_object(raw)
    return read(asked, service)


def _record(request: Request, model: str) -> None:
    request.scope["state"]["record"].model = model


def _model(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's keys and Anthropic's side by side."""
    made = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.created,
        "created_at": made,
        "owned_by": "hybridkv",
        "max_model_len": service.context,
    }
