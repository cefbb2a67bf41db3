"""The routes. What they do is in `service.py`; here is who calls what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import UsageError
from tokentwin.provenance import VERSION
from tokentwin.server.errors import ApiError, json_response
from tokentwin.server.meters import CONTENT_TYPE
from tokentwin.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
    token_ids,
)
from tokentwin.server.service import Service, new_request_id

_OPEN = ("/health", "/metrics", "/version")
"""Paths that need no key."""


def make_app(service: Service) -> FastAPI:
    """The application; the backend starts and stops with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.backend.start(service.meters)
        try:
            yield
        finally:
            await service.backend.stop()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    app = FastAPI(title="TokenTwin", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Gate, service=service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    _add_status_routes(app, service)
    _add_token_routes(app, service)
    _add_generation_routes(app, service)
    return app


def _add_status_routes(app: FastAPI, service: Service) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if service.draining or service.backend.failure is not None:
            raise ApiError(service.backend.failure or "the server is shutting down", 503)
        return Response(status_code=200)

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> Response:
        return Response(service.meters.text(), headers={"content-type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": VERSION})

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "tokentwin",
            "root": service.backend.root,
            "parent": None,
            "max_model_len": service.backend.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(card(name))


def _add_token_routes(app: FastAPI, service: Service) -> None:
    codec = service.backend.codec

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse(TokenizeBody, await service.body(request))
        service.check_model(body.model)
        if body.messages is not None:
            chat = ChatBody(messages=body.messages, add_generation_prompt=body.add_generation_prompt)
            ids = await service.encode(_render(service, chat), add_special_tokens=False)
        elif body.prompt is not None:
            text = CompletionBody(prompt=body.prompt).prompts()[0]
            assert isinstance(text, str)
            ids = await service.encode(text, add_special_tokens=body.add_special_tokens is not False)
        else:
            raise ApiError("prompt or messages is missing", param="prompt")
        strings = [codec.decode([one], skip_special_tokens=False) for one in ids]
        return json_response(
            {
                "count": len(ids),
                "max_model_len": service.backend.max_model_len,
                "tokens": ids,
                "token_strs": strings if body.return_token_strs else None,
            }
        )

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse(DetokenizeBody, await service.body(request))
        service.check_model(body.model)
        ids = token_ids(body.tokens, codec.vocab_size, "tokens")
        return json_response({"prompt": codec.decode(ids, skip_special_tokens=False)})


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse(CompletionBody, await service.body(request))
        service.check_model(body.model)
        sampling = body.checked_sampling()
        prompts = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                add = body.add_special_tokens is not False
                prompts.append(await service.encode(prompt, add_special_tokens=add))
            else:
                prompts.append(token_ids(prompt, service.backend.codec.vocab_size, "prompt"))
        return await service.answer(request, body, sampling, prompts, chat=False)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse(ChatBody, await service.body(request))
        service.check_model(body.model)
        sampling = body.checked_sampling()
        ids = await service.encode(_render(service, body), add_special_tokens=False)
        return await service.answer(request, body, sampling, [ids], chat=True)


def _render(service: Service, body: ChatBody) -> str:
    turns = body.turns()
    try:
        return service.backend.codec.render(turns, **body.template_variables())
    except UsageError as error:
        raise ApiError(str(error), param="messages") from None
    except Exception as error:  # a template is a program: it can fail in any way on what a client sends
        what = f"{type(error).__name__}: {error}"[:200]
        raise ApiError(
            f"the model's chat template fails on these messages: {what}", param="messages"
        ) from None


# ---- around every route ------------------------------------------------------------------------------------


class _Gate:
    """Asks for the key and gives each request an id, in the answer's header too."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = new_request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {}).update(request_id=request_id, came_ns=time.time_ns())

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if scope["path"] not in _OPEN and not self._service.allows(headers.get(b"authorization", b"")):
            challenge = {"www-authenticate": "Bearer"}
            error = ApiError(
                "the API key is missing or wrong", 401, code="invalid_api_key", headers=challenge
            )
            await error.response()(scope, receive, tell)
            return
        await self._app(scope, receive, tell)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    return ApiError(f"{error.detail}: {where}", error.status_code, headers=error.headers).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    return ApiError("the server failed on this request; its log says how", 500).response()
