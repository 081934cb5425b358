"""The application: paths, who may use them, and errors in one form."""

import hmac
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TextIO
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nibblelm.server.answers import answer
from nibblelm.server.chat import chat_completions
from nibblelm.server.completions import completions
from nibblelm.server.errors import ApiError
from nibblelm.server.metrics import Metrics
from nibblelm.server.page import page
from nibblelm.server.service import ClientGoneError, Service
from nibblelm.server.tokens import detokenize, tokenize

_OPEN = ("/", "/health")
"""Paths that need no key: a load balancer has none, and the page asks for it."""


def application(service: Service, keys: Sequence[str], origins: Sequence[str], log: TextIO | None = None) -> Starlette:
    """keys: any of them opens all paths, none are needed without any; origins: of pages that may use the server; log:
    gets a line for each request."""
    metrics, shown = Metrics(service), page()

    async def health(_: HttpRequest) -> Response:
        status, word = service.health()
        return answer({"status": word}, status)

    async def show_metrics(_: HttpRequest) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def show_page(_: HttpRequest) -> Response:
        return shown

    async def models(_: HttpRequest) -> Response:
        return answer({"object": "list", "data": [_model(service, name) for name in service.names]})

    async def model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in service.names:
            known = ", ".join(service.names)
            raise ApiError(404, f"the model {name!r:.80} is not here; served: {known}", code="model_not_found")
        return answer(_model(service, name))

    posts = {
        "/v1/completions": _Post(service, completions),
        "/v1/chat/completions": _Post(service, chat_completions),
        "/tokenize": _Post(service, tokenize),
        "/detokenize": _Post(service, detokenize),
    }
    cors = Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", health),
            Route("/metrics", show_metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *(Route(path, post, methods=["POST"]) for path, post in posts.items()),
        ],
        middleware=[*([cors] if origins else []), Middleware(_Guard, keys=list(keys), posts=posts, log=log)],
        exception_handlers={ApiError: _refused, HTTPException: _no_route, Exception: _failed},
    )
    app.router.redirect_slashes = False  # to http:// and what Host says, whatever a proxy before it speaks
    return app


def _model(service: Service, name: str) -> dict[str, Any]:
    llm = service.llm
    about = {"id": name, "object": "model", "created": service.created, "owned_by": "nibblelm"}
    return about | {"max_model_len": llm.max_context}


class _Post:
    """An endpoint as an application, which answers its own errors."""

    def __init__(self, service: Service, endpoint: Callable[[Service, HttpRequest], Awaitable[Any]]) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._endpoint(self._service, HttpRequest(scope, receive, send))
        except ApiError as error:
            response = _answer(error)
        except (ClientGoneError, ClientDisconnect):
            response = Response(status_code=499)
        await response(scope, receive, send)


class _Guard:
    """Asks for a key, and gives every answer a name that clients can quote. It passes on what is posted by itself: to
    look for its route takes half as long as to read it."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], posts: Mapping[str, ASGIApp], log: TextIO | None) -> None:
        self._app, self._keys, self._posts, self._log = app, [key.encode() for key in keys], posts, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        name, begun, status = secrets.token_hex(16), time.perf_counter(), 499  # where the client leaves

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"], status = name, message["status"]
            await send(message)

        given = Headers(scope=scope).get("authorization", "") if self._keys and scope["path"] not in _OPEN else None
        if given is not None and not self._knows(given):
            what = "this key is none of the server's; one is needed" if given else "a key is needed"
            message = f"{what}, in the header Authorization: Bearer KEY"
            error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            await _answer(error)(scope, receive, named)
        else:
            app = self._posts.get(scope["path"], self._app) if scope["method"] == "POST" else self._app
            await app(scope, receive, named)
        if self._log is not None:
            whom, spent_ms = (scope["client"] or ("?",))[0], 1e3 * (time.perf_counter() - begun)
            what = quote(scope["path"][:200], "/:")
            print(f"{whom} {scope['method']} {what} {status} {spent_ms:.1f} ms {name}", file=self._log, flush=True)

    def _knows(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        found = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]  # all, in the same time
        return scheme.lower() == "bearer" and any(found)


def _answer(error: ApiError) -> Response:
    return answer(error.body, error.status, error.headers)


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(error)


async def _no_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = HTTPStatus(error.status_code).phrase.lower()
    path = f"{request.method} {request.url.path}"
    return _answer(ApiError(error.status_code, f"{what}: {path:.200}", headers=error.headers))


async def _failed(_: HttpRequest, error: Exception) -> Response:
    """A mistake of the server itself. Starlette raises it again, so that it is logged with its traceback."""
    return _answer(ApiError(500, f"the server failed: {traceback.format_exception_only(error)[-1].strip():.300}"))
