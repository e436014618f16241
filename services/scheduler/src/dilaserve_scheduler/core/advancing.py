"""What follows from progress: more credit, another threshold, a move at the end of a block."""

from __future__ import annotations

from collections.abc import Iterable

from dilaserve.messages import Rejected, StepItemResult, StepResult
from dilaserve_scheduler.core import credit
from dilaserve_scheduler.core.membership import Members
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.placing import Placing
from dilaserve_scheduler.core.policy import (
    Decision,
    Inquire,
    Limit,
    Move,
    Policy,
    Requeue,
    Retune,
    Shelve,
)
from dilaserve_scheduler.core.progress import advance_by_step

__all__ = ["Advancing"]

SMOOTHING = 0.2
"""Weight of the last pass in an instance's step latency."""


class Advancing:
    """Applies step results and the policy's decisions."""

    def __init__(
        self,
        policy: Policy,
        members: Members,
        placing: Placing,
        outbox: Outbox,
        run_ahead: int | None,
    ) -> None:
        self._policy = policy
        self._members = members
        self._placing = placing
        self._outbox = outbox
        self._run_ahead = run_ahead

    def on_result(self, now: float, result: StepResult) -> None:
        """One pass of an instance: what it committed, and what it cannot run."""
        instance = self._members.touch(now, result.instance_id)
        requests = self._advance_all(now, instance, result.items)
        if instance is not None and result.n_tokens:
            _smooth_latency(instance, result.latency_ms / 1000)
        if instance is not None and requests:
            self.decide(now, self._policy.stepped(now, instance, result, requests))
        for request in requests:
            self.go_on(now, request)
        for rejected in result.rejected:
            self._rejected(now, result.instance_id, rejected)

    def go_on(self, now: float, request: Request) -> None:
        """After progress: extend the credit, or move it now that its blocks are done."""
        if not request.placed:
            return
        if request.asked_block < request.block or request.has_draining_owner:
            self._ask_where_next(now, request)
        if request.is_leaving and credit.ran_out(request):
            self._depart(now, request, request.leaving_for)
        if request.placed and credit.extend(request, self._run_ahead):
            self._outbox.credit(request)

    def decide(self, now: float, decisions: Iterable[Decision]) -> None:
        """Carry out what the policy wants."""
        for decision in decisions:
            match decision:
                case Retune(request, threshold):
                    self._retune(request, threshold)
                case Move(request, to, at_once):
                    self._move(now, request, to, at_once=at_once)
                case Inquire(query):
                    self._outbox.ask(query)
                case Requeue(request):
                    self._placing.requeue(request)
                case Shelve(request):
                    self._shelve(now, request)
                case Limit(instance, recompute_tokens):
                    instance.recompute_tokens = recompute_tokens

    def _advance_all(
        self, now: float, instance: Instance | None, items: list[StepItemResult]
    ) -> list[Request]:
        requests = self._placing.requests
        progressed = []
        for item in items:
            request = requests.get(item.request_id)
            if request is not None and self._advance(now, instance, request, item):
                progressed.append(request)
        return progressed

    def _advance(
        self, now: float, instance: Instance | None, request: Request, item: StepItemResult
    ) -> bool:
        """Whether it went on (an ended request did not)."""
        current = request.instance is instance and request.epoch == item.epoch
        if item.outcome == "committed" or item.outcome == "duplicate":
            request.confirmed |= current
            if instance is not None and not request.weights_hash:
                request.weights_hash = instance.weights_hash
            if item.finish_reason is None:
                return advance_by_step(now, request, item)
            advance_by_step(now, request, item)
            self._placing.drop(now, request, finished=True, release=not current)
        elif item.outcome == "terminal":
            self._placing.drop(now, request, finished=False, release=not current)
        elif item.outcome == "fenced" and current and request.placed:
            self._outbox.load([request])
        return False

    def _ask_where_next(self, now: float, request: Request) -> None:
        block = request.block
        if block + 1 < request.n_blocks and credit.is_ending(request) and not request.is_leaving:
            request.asked_block = block
            leaves = request.has_draining_owner
            choose = self._policy.place if leaves else self._policy.block_ending
            to = choose(now, request)
            if to is not None and to is not request.instance:
                request.leaving_for = to

    def _depart(self, now: float, request: Request, to: Instance | None) -> None:
        if to is None:
            self._placing.move(now, request, None, "shelved")
        elif to.has_room(request) and to.state == "live":
            self._placing.move(now, request, to, "moved")
        else:
            request.leaving_for = None

    def _retune(self, request: Request, threshold: float) -> None:
        if request.placed and request.threshold != threshold:
            request.threshold = threshold
            self._outbox.credit(request)

    def _move(self, now: float, request: Request, to: Instance, *, at_once: bool) -> None:
        if not request.placed:
            return
        request.is_shelved = False
        request.leaving_for = None if to is request.instance else to
        if at_once and request.leaving_for is not None:
            self._depart(now, request, to)
        self.go_on(now, request)

    def _shelve(self, now: float, request: Request) -> None:
        if request.placed:
            request.is_shelved, request.leaving_for = True, None
            self.go_on(now, request)

    def _rejected(self, now: float, instance_id: str, rejected: Rejected) -> None:
        request = self._placing.requests.get(rejected.request_id)
        if request is None or not request.placed or request.epoch != rejected.epoch:
            return
        instance = request.instance
        if instance is None or instance.instance_id != instance_id:
            return
        match rejected.reason:
            case "never_fits":
                self._placing.refuse_at(now, request, instance, rejected.detail)
            case "invalid":
                error = f"{instance_id} cannot run the request: {rejected.detail}"
                self._placing.fail(now, request, error, "invalid")
            case "unknown" | "terminal" | "fenced":
                self._outbox.load([request])


def _smooth_latency(instance: Instance, step_s: float) -> None:
    weight = SMOOTHING if instance.step_s else 1.0
    instance.step_s += weight * (step_s - instance.step_s)
