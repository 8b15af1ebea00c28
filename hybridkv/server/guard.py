"""What every request passes before its route: its id, Host, Origin, key, and its body within limits of size and time.
Whatever fails afterwards, too, is told in the shape of the dialect that was spoken.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridkv.errors import HybridKVError
from hybridkv.server.bodies import Body
from hybridkv.server.origins import check_head, cross_origin_headers, is_preflight, own_names, settle_target
from hybridkv.server.problems import ApiError, ClientGone, bad, unavailable
from hybridkv.server.record import Record, RequestLog, log, request_id
from hybridkv.server.service import RETRY_SECONDS, Service

SALTED = b"hybridkv: who may begin with what another one has read"
OPEN_PATHS = frozenset({"/", "/page.css", "/page.js", "/health", "/live", "/ready"})  # without a key
PROBED = frozenset({"/health", "/live", "/ready", "/metrics"})  # asked every few seconds: logged only if they fail
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
INTERNAL = "the server failed; its log has the reason under this request's id"


class Guard:
    """Wraps the routes."""

    def __init__(self, routes: ASGIApp, service: Service, known: frozenset[str]) -> None:
        self._routes, self._service, self._known = routes, service, known
        self._log = RequestLog(service.settings.log_json)
        self._keys = [_digest(key) for key in service.settings.api_keys]
        # requests of different keys share nothing that they have read
        self._salts = {key: hmac.digest(SALTED, key, "sha256") for key in self._keys}
        self._is_own = own_names(service.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        settle_target(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, allowed = scope["path"], self._service.settings.allowed_origins
        route = next((known for known in (path, path.rpartition("/")[0] + "/{id}") if known in self._known), "other")
        method = scope["method"] if scope["method"] in METHODS else "other"  # lines are counted by it
        record = Record(request_id(headers.get("x-request-id")), f"{method} {route}")
        trace = headers.get("traceparent", "")
        record.trace = trace if trace.isascii() and trace.isprintable() and 0 < len(trace) <= 64 else None
        record.trace_state = headers.get("tracestate", "")[:512] or None  # as much as W3C wants to be passed on
        state: dict[str, Any] = {**scope.get("state", {}), "record": record}
        scope["state"] = state
        scope["app"] = self  # so that Starlette's router raises what it would answer in plain text
        started, body = False, None

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, record.status = True, message["status"]
                own = [*_own_headers(record), *cross_origin_headers(headers, allowed, is_preflight(scope, headers))]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            try:
                async with asyncio.timeout(self._service.settings.write_seconds):
                    await send(message)
            except TimeoutError:  # nobody reads: nothing more can be said
                scope.get("extensions", {}).get("hybridkv.abort", lambda: None)()
                raise ClientGone from None

        try:
            self._check(scope, headers)
            if is_preflight(scope, headers):
                await guarded_send({"type": "http.response.start", "status": 204})
                await guarded_send({"type": "http.response.body"})
                return
            if scope["method"] == "POST" and path not in OPEN_PATHS:  # nobody without a key fills the memory for bodies
                body = Body(self._service.bodies, state.get("salt", b""))
                state["body"], seconds = body, self._service.settings.body_seconds
                await body.receive(headers, receive, self._service.body_limit, seconds)
            await self._routes(scope, receive, guarded_send)
        except ClientGone:
            record.status = 499
        except BaseException as found:
            problem = _as_problem(found, record)
            # where it was raised is of no use any more, and holds the body
            problem.__traceback__ = problem.__context__ = None
            record.problem = problem
            if isinstance(found, asyncio.CancelledError):
                raise
            if not started:
                with suppress(ClientGone):
                    await self._tell(problem, path, record, guarded_send)
        finally:
            if body is not None:
                body.drop()
            self._service.metrics.http.labels(route, str(record.status)).inc()
            if record.cause is not None and not isinstance(record.cause, HybridKVError | ApiError):
                log.error("%s failed", record.id, exc_info=record.cause)
            if path not in PROBED or record.status >= 500:
                self._log.write(record)
            if self._service.tracing is not None:
                self._service.tracing.finished(record)

    # ---- who may ask

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Host, Origin and key, then what kind of body comes; or ApiError."""
        check_head(scope)
        host, settings = headers.get("host", ""), self._service.settings
        if not self._is_own(headers.get("host")):
            raise ApiError(403, "this server does not answer to that Host; allow it with --allowed-host")
        origin = headers.get("origin")
        own = (f"http://{host}", f"https://{host}", *settings.allowed_origins)
        if origin is not None and origin not in own:
            raise ApiError(403, "pages of that Origin may not ask; allow it with --allowed-origin")
        if is_preflight(scope, headers):  # a browser sends no key with it
            return
        if self._keys and scope["path"] not in OPEN_PATHS:
            key = self._key(headers)
            if key is None:
                raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
            scope["state"]["salt"] = self._salts[key]
        if "transfer-encoding" in headers and "content-length" in headers:  # whose end would it be
            raise ApiError(400, "a request has a length or is chunked, not both", headers={"connection": "close"})
        if scope["method"] != "POST":
            return
        if self._service.draining:
            raise unavailable("the server is shutting down", RETRY_SECONDS)
        if not _is_json(headers.get("content-type", "")):
            raise ApiError(415, "the body must be JSON in UTF-8, with content-type: application/json")
        if headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "compressed bodies are not read; leave out content-encoding")

    def _key(self, headers: Mapping[str, str]) -> bytes | None:
        """The digest of a right key that came in either form. All are compared, of one length, in constant time."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [_digest(headers.get("x-api-key", ""))]
        if scheme.lower() == "bearer":
            given.append(_digest(bearer.strip()))
        found = None
        for mine in self._keys:
            for theirs in given:
                if hmac.compare_digest(mine, theirs):
                    found = mine
        return found

    # ---- what went wrong

    async def _tell(self, problem: ApiError, path: str, record: Record, send: Send) -> None:
        anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
        body = problem.anthropic(record.id) if anthropic else problem.openai()
        status = problem.anthropic_status if anthropic else problem.status
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in problem.headers.items()]
        if not problem.again:  # clients try others again by themselves, and so may a router
            headers.append((b"x-should-retry", b"false"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})


def _is_json(content_type: str) -> bool:
    """Whether a body is JSON in UTF-8. Parameters beside the charset say nothing about it."""
    kind, *parameters = content_type.lower().split(";")
    named = (parameter.partition("=") for parameter in parameters)
    charsets = {value.strip(" \t\"'") for name, _, value in named if name.strip() == "charset"}
    return kind.strip() == "application/json" and charsets <= {"", "utf-8"}


def _as_problem(found: BaseException, record: Record) -> ApiError:
    if isinstance(found, ApiError):
        return found
    if isinstance(found, HTTPException):  # of the router
        words = {404: "there is nothing at this path", 405: "this path does not take that method"}
        return ApiError(found.status_code, words.get(found.status_code, "refused"), headers=dict(found.headers or {}))
    if isinstance(found, HybridKVError):
        return bad(str(found))
    record.cause = record.cause or found
    return ApiError(500, INTERNAL)


def _own_headers(record: Record) -> list[tuple[bytes, bytes]]:
    name = record.id.encode()
    return [(b"x-request-id", name), (b"request-id", name), (b"x-content-type-options", b"nosniff")]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
