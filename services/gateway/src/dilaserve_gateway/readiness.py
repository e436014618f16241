"""Whether the gateway can serve: a real request of one block has run through every part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dilaserve.errors import UnavailableError
from dilaserve_gateway.ask import Ask
from dilaserve_gateway.errors import ApiError
from dilaserve_gateway.gateway import Gateway, new_request_id

log = logging.getLogger(__name__)

RETRY_S = 0.25
LOG_EVERY_S = 10.0
STORE_TIMEOUT_S = 1.0


class Probe:
    """Sends one small request until it is answered once."""

    def __init__(self, gateway: Gateway, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._clock = clock
        self.took_s: float | None = None
        """How long the request took that was answered; None before."""
        self.reason = "the first request has not been sent"
        """Why not ready."""

    async def run(self) -> None:
        """Return when a request was answered."""
        logged_s: float | None = None
        self.reason = "the first request has not been answered"
        while self.took_s is None:
            started_s = self._clock()
            try:
                await self._send()
            except (ApiError, UnavailableError) as error:
                self.reason = str(error)
                if logged_s is None or self._clock() - logged_s >= LOG_EVERY_S:
                    log.info("not ready yet: %s", error)
                    logged_s = self._clock()
                await asyncio.sleep(RETRY_S)
            else:
                self.took_s = self._clock() - started_s
        log.info("ready: a request of one block took %.0f ms", 1000 * self.took_s)

    async def why_not_ready(self) -> str:
        """Empty when ready: a request has been answered, and the store answers now."""
        if self.took_s is None:
            return self.reason
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._gateway.store.memory()
        except (UnavailableError, TimeoutError) as error:
            return f"the store does not answer: {error}"
        return ""

    async def _send(self) -> None:
        gateway = self._gateway
        block_length = gateway.settings.block_length
        ask = Ask(
            operation="text_completion",
            prompts=([min(gateway.model.eos_ids, default=0)],),
            n_output=min(block_length, gateway.model.context_length - 1),
            seed=0,
            block_length=block_length,
            ignore_eos=True,
        )
        call = await gateway.open(ask, new_request_id("probe"), {})
        try:
            async for _ in call.updates():
                pass
        finally:
            call.close()
