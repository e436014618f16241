"""Submissions and cancellations: who is taken, who is refused, and with which advice.

A request that fits an instance in principle is admitted and, while nobody has room, parked. What
is too much is the policy's to say.
"""

from __future__ import annotations

from typing import Literal

from dilaserve.messages import Cancel, Cancelled, Refused, Submit
from dilaserve_scheduler.core.membership import Members
from dilaserve_scheduler.core.model import Request
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.placing import Placing
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.core.settings import CoreSettings

__all__ = ["Admission"]

Code = Literal["overloaded", "no_instance", "never_fits", "unknown", "finished"]


class Admission:
    """Answers gateways. Idempotent by request id."""

    def __init__(
        self,
        policy: Policy,
        members: Members,
        placing: Placing,
        outbox: Outbox,
        settings: CoreSettings,
    ) -> None:
        self._policy = policy
        self._members = members
        self._placing = placing
        self._outbox = outbox
        self._settings = settings
        self._early: dict[str, Submit] = {}
        self._open_at: float | None = None

    def open(self, now: float) -> None:
        """Start. Until instances had time to be heard, submissions wait for the first one."""
        self._open_at = now + self._settings.dead_after_s

    def wake_at(self) -> float | None:
        """When submissions that came too early are to be answered at the latest."""
        return self._open_at if self._early else None

    def on_submit(self, now: float, event: Submit) -> None:
        """A new request, or one submitted before."""
        request = self._placing.requests.get(event.request_id)
        if request is not None:
            self._repeat(now, request)
        elif self._is_early(now) and not self._members.is_served(event.model_id, now):
            self._early[event.request_id] = event
        else:
            self._consider(now, event)

    def on_cancel(self, now: float, event: Cancel) -> None:
        """The gateway marks the record itself; here its place is freed."""
        request = self._placing.requests.get(event.request_id)
        early = self._early.pop(event.request_id, None)
        known = request is not None or early is not None
        self._outbox.reply(event.request_id, Cancelled(request_id=event.request_id, known=known))
        if early is not None or (request is not None and request.state == "submitting"):
            self._refuse(event.request_id, "finished", "the request was cancelled")
        if request is None or request.state == "failing":
            return
        if request.state == "submitting":
            request.cancelled = True  # the answer to `admit` is needed first
        else:
            self._placing.drop(now, request, finished=False)

    def reconsider(self, now: float) -> None:
        """Answer the early ones for whom an instance is there, or whose time is up."""
        if not self._early:
            return
        for event in list(self._early.values()):
            if self._members.is_served(event.model_id, now) or not self._is_early(now):
                del self._early[event.request_id]
                self._consider(now, event)

    def _is_early(self, now: float) -> bool:
        return self._open_at is not None and now < self._open_at

    def _repeat(self, now: float, request: Request) -> None:
        if request.state == "failing" or request.cancelled:
            self._refuse(request.request_id, "finished", "the request has ended; send a new one")
        elif request.state != "submitting":
            self._placing.reply_admitted(now, request)

    def _consider(self, now: float, event: Submit) -> None:
        refusal = self._invalid(event) or self._unservable(now, event)
        if refusal is not None:
            self._outbox.reply(event.request_id, refusal)
            return
        request = _new_request(event)
        overload = self._policy.refuse(now, request)
        if overload is not None:
            self._refuse(event.request_id, "overloaded", overload.reason, overload.retry_after_s)
        else:
            self._placing.submit(now, request)

    def _invalid(self, event: Submit) -> Refused | None:
        if min(event.n_prompt, event.n_output, event.block_length) >= 1:
            return None
        reason = (
            f"n_prompt={event.n_prompt}, n_output={event.n_output} and "
            f"block_length={event.block_length} must all be at least 1"
        )
        return Refused(request_id=event.request_id, reason=reason, code="never_fits")

    def _unservable(self, now: float, event: Submit) -> Refused | None:
        if not self._members.is_served(event.model_id, now):
            return Refused(
                request_id=event.request_id,
                reason=f"no live instance serves {event.model_id!r}; start one, or wait for it",
                code="no_instance",
                retry_after_s=self._settings.no_instance_retry_s,
            )
        n_tokens, largest = event.n_prompt + event.n_output, self._members.largest(event.model_id)
        if n_tokens <= largest:
            return None
        limit = self._members.limit(event.model_id)
        reason = (
            f"{event.n_prompt} prompt + {event.n_output} output tokens are {n_tokens}, and the "
            f"largest live instance takes {largest}{limit}; shorten the prompt or the output"
        )
        return Refused(request_id=event.request_id, reason=reason, code="never_fits")

    def _refuse(
        self, request_id: str, code: Code, reason: str, retry_after_s: float | None = None
    ) -> None:
        refusal = Refused(
            request_id=request_id, reason=reason, code=code, retry_after_s=retry_after_s
        )
        self._outbox.reply(request_id, refusal)


def _new_request(event: Submit) -> Request:
    return Request(
        request_id=event.request_id,
        model_id=event.model_id,
        n_prompt=event.n_prompt,
        n_output=event.n_output,
        block_length=event.block_length,
        arrival_s=event.arrival_s,
        slo_s=event.slo_ms / 1000 if event.slo_ms is not None else None,
        priority=event.priority,
        min_confidence=event.min_confidence,
    )
