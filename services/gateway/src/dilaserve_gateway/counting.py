"""Counts HTTP requests by route and status code. Changes nothing of them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dilaserve.telemetry import Telemetry


class CountRequests:
    """ASGI middleware. The route is its pattern, `other` for a path that there is not."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, then count; a failure without an answer counts as 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code = 500

        async def send_noting(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._telemetry.count("dilaserve:http_requests_total", route=route, code=code)
