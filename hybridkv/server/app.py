"""The routes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from hybridkv import __version__
from hybridkv.server.about import props, slots
from hybridkv.server.answering import Json, answer, as_json
from hybridkv.server.anthropic_answer import MessageFormat
from hybridkv.server.anthropic_request import MessageCall, read_count, read_message_request
from hybridkv.server.fields import Fields, parse_object
from hybridkv.server.guard import Guard
from hybridkv.server.openai_chat import ChatCall, ChatFormat, read_chat
from hybridkv.server.openai_completions import CompletionCall, CompletionFormat, read_completion
from hybridkv.server.page import FILES, shaded_prompt, static_file
from hybridkv.server.problems import bad
from hybridkv.server.responses_answer import ResponseFormat
from hybridkv.server.responses_request import ResponseCall, read_response_request
from hybridkv.server.service import Service
from hybridkv.server.sessions import ACTIONS
from hybridkv.server.tokens import read_detokenize, read_template, read_tokenize

Caller = tuple[bytes, str]  # salt of its key, and the conversation that its header names
SESSION_HEADER = "x-session-id"


def make_app(service: Service) -> ASGIApp:
    """The server as an ASGI application."""

    async def asked(do: Any, read: Any, request: Request) -> Any:
        """What `read` makes of the body, on a worker thread; afterwards nobody holds it."""
        caller = _caller(request)
        async with service.reading(caller[0]):
            with request.scope["state"]["body"] as raw:
                return await service.work(do, read, raw, service, caller)

    async def told(read: Any, request: Request) -> Response:
        return Json(await asked(_told, read, request))

    async def chat(request: Request) -> Any:
        call: ChatCall = await asked(_read, read_chat, request)
        _record(request, call.model)
        return await answer(request, service, call.job, ChatFormat(call, service), call.options.stream)

    async def completions(request: Request) -> Any:
        call: CompletionCall = await asked(_read, read_completion, request)
        _record(request, call.model)
        return await answer(request, service, call.job, CompletionFormat(call, service), call.options.stream)

    async def messages(request: Request) -> Any:
        call: MessageCall = await asked(_read, read_message_request, request)
        _record(request, call.model)
        return await answer(request, service, call.job, MessageFormat(call), call.stream)

    async def responses(request: Request) -> Any:
        call: ResponseCall = await asked(_read, read_response_request, request)
        _record(request, call.model)
        return await answer(request, service, call.job, ResponseFormat(call), call.stream)

    async def count_tokens(request: Request) -> Response:
        return await told(read_count, request)

    async def models(request: Request) -> Response:
        service.llm  # noqa: B018  503 while it is loading
        names = service.names
        found = {"object": "list", "data": [_model(service, name) for name in names], "has_more": False}
        return JSONResponse(found | {"first_id": names[0], "last_id": names[-1]})

    async def model(request: Request) -> Response:
        return JSONResponse(_model(service, service.model_name(request.path_params["id"])))

    async def tokenize(request: Request) -> Response:
        return await told(read_tokenize, request)

    async def detokenize(request: Request) -> Response:
        return await told(read_detokenize, request)

    async def apply_template(request: Request) -> Response:
        return await told(read_template, request)

    async def sessions(request: Request) -> Response:
        (salt, _), found = _caller(request), service.sessions
        if request.method == "GET":
            return JSONResponse({"object": "list", "data": await service.move(found.listed, salt)})
        given: Fields = await asked(_read, _as_it_is, request)
        action, name = given.choice("action", ACTIONS), given.text("name", 256)
        if not action or not name:
            raise bad(f"name and action are needed; action is one of {', '.join(ACTIONS)}")
        return JSONResponse(await service.move(found.act, salt, action, name, given.text("to", 256)))

    async def properties(request: Request) -> Response:
        return JSONResponse(props(service))

    async def running(request: Request) -> Response:
        return JSONResponse(slots(service))

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

    async def cache(request: Request) -> Response:
        return JSONResponse(await service.feed.once(_caller(request)[0]))

    async def cache_events(request: Request) -> Any:
        return service.feed.watch(_caller(request)[0], request.headers.get("last-event-id"))

    async def cache_request(request: Request) -> Response:
        recorder, tokenizer = service.feed.recorder, service.llm.tokenizer
        number, first = (_whole(text) for text in (request.path_params["id"], request.query_params.get("first", "0")))
        return JSONResponse(
            await service.work(shaded_prompt, recorder, tokenizer, number, _caller(request)[0], first),
            headers={"cache-control": "no-store"},
        )

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", model),
        Route("/v1/cache/sessions", sessions, methods=["GET", "POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
        Route("/props", properties),
        Route("/slots", running),
        Route("/health", ready),
        Route("/ready", ready),
        Route("/live", live),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/v1/cache", cache),
        Route("/v1/cache/events", cache_events),
        Route("/v1/cache/requests/{id}", cache_request),
        *(Route(path, static_file(path)) for path in FILES),
    ]
    known = frozenset(route.path.replace("{id:path}", "{id}") for route in routes)
    return Guard(Router(routes, redirect_slashes=False), service, known)


def _read(read: Any, raw: bytes, service: Service, caller: Caller) -> Any:
    """On a worker thread: JSON, then all that a route checks."""
    asked: Fields = parse_object(raw)
    asked.salt, asked.session = caller
    return read(asked, service)


def _as_it_is(given: Fields, service: Service) -> Fields:
    return given


def _told(read: Any, raw: bytes, service: Service, caller: Caller) -> bytes:
    """The same for what is answered at once, as JSON."""
    return as_json(_read(read, raw, service, caller))


def _caller(request: Request) -> Caller:
    session = request.headers.get(SESSION_HEADER, "")
    if len(session) > 256:
        raise bad(f"the header {SESSION_HEADER} has more than 256 characters")
    return request.scope["state"].get("salt", b""), session


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise bad("requests and tokens are counted in whole numbers")
    return int(text)


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
