"""The HTTP routes: what comes in is checked, opened as a call, and answered or streamed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from dilaserve import __version__
from dilaserve.errors import DiLaServeError
from dilaserve_gateway.answers import AnswerFormat, ChatFormat, CompletionFormat, Head
from dilaserve_gateway.ask import Ask
from dilaserve_gateway.counting import CountRequests
from dilaserve_gateway.errors import ApiError, from_error, internal_error, model_not_found
from dilaserve_gateway.gateway import Gateway, Moment, OpenCall, new_request_id
from dilaserve_gateway.history import read_history
from dilaserve_gateway.intake import parse_body, parse_level_headers, read_body
from dilaserve_gateway.openapi import describe_bodies
from dilaserve_gateway.prompts import Prompter
from dilaserve_gateway.readiness import Probe
from dilaserve_gateway.schema import ChatBody, CompletionBody, DenoiseBody
from dilaserve_gateway.sse import ClientDisconnectedError, EventStream, unless_disconnected
from dilaserve_gateway.streaming import collect, stream_answer, stream_steps

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


def create_app(gateway: Gateway, prompter: Prompter, probe: Probe) -> FastAPI:
    """The application. Starts nothing: the gateway and the probe run elsewhere."""
    app = FastAPI(title="DiLaServe", version=__version__, docs_url=None, redoc_url=None)
    api = _Api(gateway, prompter, probe)
    bodies: dict[str, type[BaseModel]] = {}
    for path, generate, body in (
        ("/v1/chat/completions", api.chat, ChatBody),
        ("/v1/completions", api.completion, CompletionBody),
        ("/v1/denoise", api.denoise, DenoiseBody),
    ):
        app.add_api_route(path, generate, methods=["POST"], tags=["generate"])
        bodies[path] = body
    for path, read in (
        ("/v1/models", api.models),
        ("/v1/models/{model_id:path}", api.model),
        ("/v1/requests/{request_id}", api.request),
        ("/healthz", api.healthy),
        ("/readyz", api.ready),
        ("/metrics", api.metrics),
    ):
        app.add_api_route(path, read, methods=["GET"], tags=["read"])
    app.add_api_route("/", api.playground, methods=["GET"], include_in_schema=False)
    app.add_middleware(CountRequests, telemetry=gateway.telemetry)
    _add_error_handlers(app)
    describe_bodies(app, bodies)
    return app


class _Api:
    """The endpoints."""

    def __init__(self, gateway: Gateway, prompter: Prompter, probe: Probe) -> None:
        self._gateway = gateway
        self._prompter = prompter
        self._probe = probe
        self._started_s = int(gateway.clocks.wall())
        self._page = files(__package__).joinpath("playground.html").read_text(encoding="utf-8")

    # --- generate ------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Continue a chat, as OpenAI's endpoint does."""
        data, arrived = await self._read(request)
        body = parse_body(data, ChatBody)
        ask = await self._prompter.chat(body, parse_level_headers(request.headers))
        call = await self._open(request, ask, "chatcmpl", arrived)
        tokenizer = self._gateway.model.tokenizer
        return await self._answer(request, call, ChatFormat(self._head(call), ask, tokenizer))

    async def completion(self, request: Request) -> Response:
        """Continue text, as OpenAI's endpoint does."""
        data, arrived = await self._read(request)
        body = parse_body(data, CompletionBody)
        ask = await self._prompter.completion(body, parse_level_headers(request.headers))
        call = await self._open(request, ask, "cmpl", arrived)
        tokenizer = self._gateway.model.tokenizer
        return await self._answer(request, call, CompletionFormat(self._head(call), ask, tokenizer))

    async def denoise(self, request: Request) -> Response:
        """Stream every denoising step: positions, tokens, confidences. Always a stream."""
        data, arrived = await self._read(request)
        body = parse_body(data, DenoiseBody)
        ask = await self._prompter.denoise(body, parse_level_headers(request.headers))
        call = await self._open(request, ask, "denoise", arrived)
        head = {
            "id": call.id,
            "model": self._gateway.model.id,
            "n_prompt": ask.n_prompt,
            "n_output": ask.n_output,
            "block_length": ask.block_length,
            "seed": ask.seed,
            "level": msgspec.to_builtins(ask.level),
        }
        events = stream_steps(
            call,
            self._gateway.model.tokenizer,
            head,
            self._gateway.clocks.monotonic,
            self._gateway.settings.keepalive_s,
        )
        return EventStream(events, call.close, _call_headers(call))

    async def _read(self, request: Request) -> tuple[bytes, Moment]:
        """The body, and when its last byte was here."""
        data = await read_body(request, self._gateway.settings.max_body_bytes)
        return data, self._gateway.clocks.now()

    async def _open(self, request: Request, ask: Ask, prefix: str, arrived: Moment) -> OpenCall:
        work = self._gateway.open(ask, new_request_id(prefix), request.headers, arrived)
        return await unless_disconnected(request.receive, work)

    async def _answer(self, request: Request, call: OpenCall, answer: AnswerFormat) -> Response:
        if call.ask.stream:
            clock, settings = self._gateway.clocks.monotonic, self._gateway.settings
            events = stream_answer(call, answer, clock, settings.keepalive_s)
            return EventStream(events, call.close, _call_headers(call))
        try:
            whole = await unless_disconnected(request.receive, collect(call, answer))
        finally:
            call.close()
        return _json(whole, headers=_call_headers(call))

    def _head(self, call: OpenCall) -> Head:
        created = int(self._gateway.clocks.wall())
        return Head(id=call.id, created=created, model=self._gateway.model.id)

    # --- read ----------------------------------------------------------------------------------

    async def models(self) -> Response:
        """The models that are served."""
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, model_id: str) -> Response:
        """One model."""
        if model_id != self._gateway.model.id:
            raise model_not_found(model_id, self._gateway.model.id)
        return _json(self._model_card())

    async def request(self, request_id: str) -> Response:
        """A request's record and every step: worker, epoch, threshold, latency, tokens."""
        gateway = self._gateway
        return _json(await read_history(gateway.store, gateway.model, request_id))

    async def healthy(self) -> Response:
        """Whether the process lives."""
        return _json({"status": "ok", "id": self._gateway.id})

    async def ready(self) -> Response:
        """Whether requests are served: 200 only after a real one has run through every part."""
        reason = await self._probe.why_not_ready()
        status = 503 if reason else 200
        return _json({"ready": not reason, "reason": reason or None}, status=status)

    async def metrics(self) -> Response:
        """Metrics as Prometheus text."""
        text, content_type = self._gateway.telemetry.render()
        return Response(text, headers={"Content-Type": content_type})

    async def playground(self) -> Response:
        """A page that shows a canvas being denoised."""
        return HTMLResponse(self._page)

    def _model_card(self) -> dict[str, Any]:
        model = self._gateway.model
        return {
            "id": model.id,
            "object": "model",
            "created": self._started_s,
            "owned_by": "dilaserve",
            "max_model_len": model.context_length,
            "default_max_tokens": model.default_output,
            "block_length": self._gateway.settings.block_length,
        }


def _add_error_handlers(app: FastAPI) -> None:
    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, DiLaServeError)
        answer = from_error(error)
        if answer.status == 500 and not isinstance(error, ApiError):
            log.error("a request met an error of ours", exc_info=error)
        return _error(answer)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = (
            f"{request.method} {request.url.path} answers {error.status_code} ({error.detail}); "
            "the endpoints are listed at /openapi.json."
        )
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        return _error(ApiError(error.status_code, message, code=code))

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # for the log: nobody reads it

    async def unexpected(_: Request, __: Exception) -> Response:
        return _error(internal_error())  # the server logs the traceback

    app.add_exception_handler(DiLaServeError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnectedError, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unexpected)


def _call_headers(call: OpenCall) -> dict[str, str]:
    headers = {"X-Request-Id": call.id, "X-Seed": str(call.ask.seed)}
    if call.ask.ignored:
        headers["X-Ignored-Fields"] = ", ".join(call.ask.ignored)
    return headers


def _error(error: ApiError) -> Response:
    return _json(error.body(), status=error.status, headers=error.headers())


def _json(
    data: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(data), status, headers=headers, media_type="application/json"
    )
