"""Which instance carries the load of which request. A request on its way has a seat at both ends.

Knows no states and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.policy import Policy

__all__ = ["Seats"]


class Seats:
    """Every change of an instance's load passes through here; `freed` is told of each that makes
    room."""

    def __init__(self, policy: Policy, outbox: Outbox, *, freed: Callable[[], None]) -> None:
        self._policy = policy
        self._outbox = outbox
        self._freed = freed

    def reserve(self, now: float, request: Request, target: Instance | None) -> None:
        """Reserve a seat at the target (None: nowhere) instead of at an earlier one."""
        if request.target is not None and request.target is not request.instance:
            self._unload(now, request, request.target)
        if request.instance is not None and request.instance.state == "dead":
            self._unload(now, request, request.instance)
            request.instance = None
        request.target = target
        if target is not None and request.request_id not in target.requests:
            target.requests[request.request_id] = request
            target.n_tokens += request.n_tokens
            self._policy.load_changed(now, target)

    def leave(
        self, now: float, request: Request, instance: Instance | None, *, release: bool = True
    ) -> None:
        """Give the seat up, and have the instance forget the request if it was sent there."""
        if instance is None:
            return
        if release and request.sent:
            self._outbox.release(instance, request.request_id, request.epoch)
        self._unload(now, request, instance)

    def vacate(self, now: float, request: Request, *, release: bool = True) -> None:
        """Give up every seat."""
        self.leave(now, request, request.instance, release=release)
        self.leave(now, request, request.target, release=False)
        request.instance = request.target = None

    def _unload(self, now: float, request: Request, instance: Instance) -> None:
        if instance.requests.pop(request.request_id, None) is not None:
            instance.n_tokens -= request.n_tokens
            self._policy.load_changed(now, instance)
            self._freed()
