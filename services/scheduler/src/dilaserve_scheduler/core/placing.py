"""Moves requests through their states: submit, park, move, fail, drop, and the store's answers.

Every change of a request's owner passes through here. Chooses nothing: that is the policy's.
"""

from __future__ import annotations

from contextlib import closing

from dilaserve.messages import Admitted, Refused
from dilaserve.store.records import AdmitAnswer, ReassignAnswer
from dilaserve_scheduler.core import credit
from dilaserve_scheduler.core.effects import Admit, Fail, FailCause, MoveCause, Reassign
from dilaserve_scheduler.core.events import AdmitAnswered, FailAnswered, ReassignAnswered
from dilaserve_scheduler.core.membership import Members
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.core.outbox import Outbox
from dilaserve_scheduler.core.patience import Patience
from dilaserve_scheduler.core.policy import Policy
from dilaserve_scheduler.core.seats import Seats
from dilaserve_scheduler.core.settings import CoreSettings
from dilaserve_scheduler.core.waiting import WaitingLine

__all__ = ["Placing"]


class Placing:
    """All requests that have not ended, and where they are."""

    def __init__(
        self, policy: Policy, members: Members, outbox: Outbox, settings: CoreSettings
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.line = WaitingLine(policy.rank)
        self.patience = Patience(settings.queue_timeout_s)
        self._policy = policy
        self._members = members
        self._outbox = outbox
        self._settings = settings
        self._seats = Seats(policy, outbox, freed=self.stir)
        self._line_stirred = False

    # --- what happens to a request -------------------------------------------------------------

    def submit(self, now: float, request: Request) -> None:
        """Have a new request admitted: on an instance with room, or parked."""
        request.advance("submit")
        self.requests[request.request_id] = request
        behind = not self.line.is_empty(request.model_id)
        self._seats.reserve(now, request, None if behind else self._policy.place(now, request))
        request.threshold = self._policy.threshold(now, request, request.target)
        self._outbox.admit(request, _id(request.target))

    def adopt(self, now: float, request: Request, owner: str) -> None:
        """Take over a request found active in the store, as it stands there."""
        self.requests[request.request_id] = request
        request.threshold = self._policy.threshold(now, request, None)
        if not owner:
            self._park(now, request)
        else:
            self._seats.reserve(now, request, self._owner(owner))
            request.sent = True
            self._start(now, request, owner)
        if request.attempts >= self._settings.max_attempts and request.state != "failing":
            self.fail(now, request, _poison(request), "poison")

    def move(
        self,
        now: float,
        request: Request,
        to: Instance | None,
        cause: MoveCause,
        *,
        owner_died: bool = False,
        stored_epoch: int | None = None,
        min_epoch: int = 0,
    ) -> None:
        """Have the store give it to another instance, or park it (None). `stored_epoch` is the
        epoch that the store is believed to hold, the known one by default."""
        request.advance("move")
        self._unpark(now, request)
        request.leaving_for, request.is_shelved = None, False
        self._seats.reserve(now, request, to)
        self._outbox.reassign(
            request,
            _id(to),
            expected_epoch=request.epoch if stored_epoch is None else stored_epoch,
            cause=cause,
            min_epoch=min_epoch,
            owner_died=owner_died,
        )

    def fence(self, now: float, request: Request, *, stored_epoch: int, above: int) -> None:
        """Leave it where it is, at an epoch above all that are known: somebody may believe to own
        it at this one."""
        epoch = max(request.epoch, above) + 1
        self.move(
            now,
            request,
            request.instance,
            "fenced",
            stored_epoch=stored_epoch,
            min_epoch=epoch,
        )

    def displace(self, now: float, request: Request, cause: MoveCause) -> None:
        """Its owner is gone, or will not run it: place it elsewhere, or park it."""
        died = cause == "died" and request.sent
        self.move(now, request, self._policy.place(now, request), cause, owner_died=died)

    def give_up_on(self, now: float, request: Request, deaf: Instance) -> None:
        """Its owner lives, and takes no commands: place it elsewhere. Where that cannot be, wait
        for much longer, and fail it in the end."""
        others = [i for i in self._members if i is not deaf and i.state == "live"]
        if any(other.fits(request) for other in others):
            request.refused_by |= {deaf.instance_id}
            self.displace(now, request, "misplaced")
        elif request.n_unheeded >= self._settings.n_unheeded_last:
            error = f"{deaf.instance_id} takes no commands, and nobody else can run the request"
            self.fail(now, request, f"{error}; see whether it may read from NATS", "unheeded")

    def refuse_at(self, now: float, request: Request, instance: Instance, detail: str) -> None:
        """The instance can never run it: try the others that might, else fail it."""
        request.refused_by |= {instance.instance_id}
        if self._runs_somewhere(request):
            self.displace(now, request, "misplaced")
        else:
            error = f"no live instance can run {request.n_tokens} tokens ({detail}); send fewer"
            self.fail(now, request, error, "never_fits")

    def readmit(self, now: float, request: Request) -> None:
        """The store lost its admission: repeat it, for the same owner."""
        request.advance("readmit")
        self._unpark(now, request)
        self._seats.reserve(now, request, request.target or request.instance)
        self._outbox.admit(request, _id(request.target))

    def fail(self, now: float, request: Request, error: str, cause: FailCause) -> None:
        """End it with a message for the client."""
        request.advance("fail")
        self._unpark(now, request)
        self._seats.vacate(now, request)
        self._outbox.fail(request, error, cause)

    def drop(self, now: float, request: Request, *, finished: bool, release: bool = True) -> None:
        """Forget it: the store has its end."""
        request.advance("end")
        self._unpark(now, request)
        self._seats.vacate(now, request, release=release)
        request.call = None
        del self.requests[request.request_id]
        self._policy.ended(now, request, finished=finished)
        self._outbox.ended(request.request_id)

    def place_waiting(self, now: float) -> None:
        """Place those who wait, in order, as far as there is room. One that no live instance can
        ever run is passed over; any other that does not find room holds up the rest."""
        if not self._line_stirred:
            return
        for model_id in self.line.models():
            with closing(self.line.in_order(model_id)) as requests:
                for request in requests:
                    instance = self._policy.place(now, request)
                    if instance is not None:
                        self.move(now, request, instance, "placed")
                    elif self._runs_somewhere(request):
                        break
        self._line_stirred = False

    def give_up_waiting(self, now: float) -> None:
        """Fail those who have waited for too long."""
        for request in self.patience.take_due(now):
            error = self.patience.explain(request, is_runnable=self._runs_somewhere(request))
            self.fail(now, request, error, "timed_out")

    def requeue(self, request: Request) -> None:
        """Its rank has changed."""
        if self.line.leave(request):
            self.line.join(request)
            self.stir()

    def stir(self) -> None:
        """There may be room now for somebody who waits."""
        self._line_stirred = True

    # --- the store's answers -------------------------------------------------------------------

    def on_admit(self, now: float, event: AdmitAnswered) -> None:
        """The answer to `submit` or `readmit`."""
        request = self._awaited(event.request_id, event.op)
        if request is None:
            return
        match event.answer.outcome:
            case "stale_term":
                self._outbox.raise_term(self._outbox.term)
            case "missing" | "terminal":
                self._refuse(request, event.answer)
                self.drop(now, request, finished=False)
            case "admitted" | "already":
                self._admitted(now, request, event.answer)

    def on_reassign(self, now: float, event: ReassignAnswered) -> None:
        """The answer to `move`."""
        request = self._awaited(event.request_id, event.op)
        if request is None:
            return
        match event.answer.outcome:
            case "stale_term":
                self._outbox.raise_term(self._outbox.term)
            case "terminal":
                self.drop(now, request, finished=False)
            case "missing":
                self.readmit(now, request)
            case "reassigned":
                self._moved(now, request, event.answer)
            case "conflict":
                self._disputed(now, request, event.answer)

    def on_fail(self, now: float, event: FailAnswered) -> None:
        """The answer to `fail`."""
        request = self._awaited(event.request_id, event.op)
        if request is None:
            return
        if event.answer.outcome == "stale_term":
            self._outbox.raise_term(self._outbox.term)
        else:
            self.drop(now, request, finished=False)

    def repeat_calls(self) -> None:
        """Ask the store again for all that is outstanding, under the present term."""
        for request in self.requests.values():
            match request.call:
                case Admit(owner=owner):
                    self._outbox.admit(request, owner)
                case Reassign() as call:
                    self._outbox.reassign(
                        request,
                        call.owner,
                        expected_epoch=call.expected_epoch,
                        cause=call.cause,
                        min_epoch=call.min_epoch,
                        owner_died=call.owner_died,
                    )
                case Fail(error=error, cause=cause):
                    self._outbox.fail(request, error, cause)

    def reply_admitted(self, now: float, request: Request) -> None:
        """Tell the gateway that the request is being served."""
        answer = Admitted(
            request_id=request.request_id,
            predicted_finish_s=self._policy.predict_finish_s(now, request),
            threshold=request.threshold,
        )
        self._outbox.reply(request.request_id, answer)

    def _awaited(self, request_id: str, op: int) -> Request | None:
        request = self.requests.get(request_id)
        return request if request and request.call and request.call.op == op else None

    def _refuse(self, request: Request, answer: AdmitAnswer) -> None:
        if answer.outcome == "missing":
            reason = "there is no such record; write it first, and submit within its expiry"
            refusal = Refused(request_id=request.request_id, reason=reason, code="unknown")
        else:
            reason = "the request has ended already; send a new one"
            refusal = Refused(request_id=request.request_id, reason=reason, code="finished")
        self._outbox.reply(request.request_id, refusal)

    def _admitted(self, now: float, request: Request, answer: AdmitAnswer) -> None:
        if request.cancelled:
            self.fail(now, request, "cancelled before it was admitted", "cancelled")
            return
        if answer.outcome == "already" and answer.owner != _id(request.target):
            self._seats.reserve(now, request, self._owner(answer.owner))
        if answer.epoch <= request.epoch:
            self._insist(now, request, "fenced", answer.epoch)
            return
        self._arrive(now, request, answer.epoch, answer.owner)
        self.reply_admitted(now, request)
        self._catch_up(request, answer.step)

    def _moved(self, now: float, request: Request, answer: ReassignAnswer) -> None:
        request.attempts = answer.attempts
        if request.attempts >= self._settings.max_attempts:
            request.epoch = answer.epoch
            self.fail(now, request, _poison(request), "poison")
            return
        self._arrive(now, request, answer.epoch, answer.owner)
        self._catch_up(request, answer.step)

    def _disputed(self, now: float, request: Request, answer: ReassignAnswer) -> None:
        """The stored epoch is not the expected one. Either the call was carried out before and
        its answer lost, or memory is wrong: then insist, above whatever is stored."""
        call = request.call
        assert isinstance(call, Reassign)
        ahead = answer.epoch > call.expected_epoch
        if answer.epoch == 0:
            self.readmit(now, request)
        elif ahead and answer.owner == call.owner and answer.epoch > request.epoch:
            self._moved(now, request, answer)
        else:
            died = call.owner_died and not ahead
            self._insist(now, request, call.cause, answer.epoch, owner_died=died)

    def _insist(
        self,
        now: float,
        request: Request,
        cause: MoveCause,
        stored_epoch: int,
        *,
        owner_died: bool = False,
    ) -> None:
        """Have the target made the owner, above all epochs that are known."""
        self.move(
            now,
            request,
            request.target,
            cause,
            owner_died=owner_died,
            stored_epoch=stored_epoch,
            min_epoch=max(request.epoch, stored_epoch) + 1,
        )

    # --- where it is ---------------------------------------------------------------------------

    def _arrive(self, now: float, request: Request, epoch: int, owner: str) -> None:
        """The store has made the target the owner, at this epoch."""
        request.call = None
        stays = request.instance is not None and request.instance is request.target
        if not stays:
            self._seats.leave(now, request, request.instance)
            request.sent = False
        request.epoch = epoch
        request.confirmed = False
        if owner:
            self._start(now, request, owner)
        else:
            self._park(now, request)

    def _start(self, now: float, request: Request, owner: str) -> None:
        request.advance("start")
        request.instance, request.target = request.target, None
        request.progress_at, request.n_nudges, request.n_unheeded = now, 0, 0
        if request.instance is None or request.instance.state == "dead":
            self.displace(now, request, self._cause_of_loss(request, owner))
            return
        request.threshold = self._policy.threshold(now, request, request.instance)
        credit.grant(request, self._settings.run_ahead)
        self._outbox.credit(request)

    def _cause_of_loss(self, request: Request, owner: str) -> MoveCause:
        if not request.sent:
            return "misplaced"
        return "left" if self._members.left_on_purpose(owner) else "died"

    def _park(self, now: float, request: Request) -> None:
        request.advance("park")
        request.instance = request.target = None
        self.line.join(request)
        self.patience.watch(now, request)
        self._policy.parked(now, request)
        self.stir()

    def _unpark(self, now: float, request: Request) -> None:
        if self.line.leave(request):
            self._policy.unparked(now, request)
            self.stir()

    def _owner(self, owner: str) -> Instance | None:
        """The instance that the store names; None for none, or one that has departed."""
        departed = not owner or self._members.has_departed(owner)
        return None if departed else self._members.expect(owner)

    def _catch_up(self, request: Request, stored_step: int) -> None:
        if stored_step != request.step and request.state in ("running", "parked"):
            self._outbox.load([request])

    def _runs_somewhere(self, request: Request) -> bool:
        if not request.refused_by and not request.weights_hash:
            return request.n_tokens <= self._members.largest(request.model_id)
        return any(i.state == "live" and i.fits(request) for i in self._members)


def _id(instance: Instance | None) -> str:
    return instance.instance_id if instance is not None else ""


def _poison(request: Request) -> str:
    return (
        f"the request's instance died {request.attempts} times while running it; it was given up "
        "so that it does not take down others; change the request before sending it again"
    )
