"""The port between the core and a policy: which instance, which threshold, who waits, who moves.

The core keeps requests alive and instances honest; a policy only chooses. It reads `Request` and
`Instance` and never changes them: what it wants changed it returns as decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dilaserve.messages import StepResult
from dilaserve_scheduler.core.model import Instance, Request

__all__ = [
    "Decision",
    "Inquire",
    "Limit",
    "Move",
    "Overload",
    "Policy",
    "Requeue",
    "Retune",
    "Shelve",
]


@dataclass(frozen=True, slots=True)
class Retune:
    """Run the next steps of a request at another threshold; sent at once."""

    request: Request
    threshold: float


@dataclass(frozen=True, slots=True)
class Move:
    """Take a request elsewhere: after the blocks already credited (the next step there is a
    recompute step anyway), or `at_once`, for the price of a rebuild in the middle of a block.
    Ignored for a request that is not running, or is there already."""

    request: Request
    to: Instance
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Shelve:
    """Let a running request wait, in its place in the line, after the blocks already credited; it
    goes on where it was. Ignored for one that does not run."""

    request: Request


@dataclass(frozen=True, slots=True)
class Inquire:
    """Ask something of the outside (a prediction); the answer comes to `told`. The core neither
    reads nor awaits it."""

    query: object


@dataclass(frozen=True, slots=True)
class Requeue:
    """Put a waiting request into the line anew: its rank has changed. Ignored for one that does
    not wait."""

    request: Request


@dataclass(frozen=True, slots=True)
class Limit:
    """Let the passes of an instance have at most so many tokens in rows that compute their whole
    length (one such row always may run; None: no limit); said with its next command."""

    instance: Instance
    recompute_tokens: int | None


Decision = Retune | Move | Inquire | Requeue | Shelve | Limit


@dataclass(frozen=True, slots=True)
class Overload:
    """A request is refused for now."""

    reason: str
    retry_after_s: float


class Policy(Protocol):
    """One way to serve a cluster. Subclass it: hooks that a policy does not need do nothing.

    Everything is called from within `Core.handle` or `Core.tick`, many times a second: no scan
    over all requests. Order of calls in the life of a request: `refuse`, `place`, `threshold`,
    `load_changed`, then `stepped` and `block_ending` as it goes, `load_changed`, `ended`; after
    the loss of its instance again from `place`. A parked request starts with `place`.
    """

    def place(self, now: float, request: Request) -> Instance | None:
        """The live instance that is to run the request, or None to let it wait (Algorithm 3).
        Must satisfy `instance.has_room(request)`."""
        ...

    def threshold(self, now: float, request: Request, instance: Instance | None) -> float:
        """The confidence threshold to start with on `instance`, or, while it waits, the one that
        is expected (Algorithm 1)."""
        ...

    def predict_finish_s(self, now: float, request: Request) -> float:
        """Predicted seconds from now to the last token, waiting included."""
        ...

    def refuse(self, now: float, request: Request) -> Overload | None:
        """Whether there is too much to do already to take a new request. Never asked about one
        that is admitted."""
        return None

    def rank(self, request: Request) -> tuple[float, ...]:
        """Order among waiting requests, lowest first; must not change while it waits but by a
        Requeue. The first that nobody has room for holds up the others of its model."""
        return (request.arrival_s,)

    def parked(self, now: float, request: Request) -> None:
        """The request waits."""
        return

    def unparked(self, now: float, request: Request) -> None:
        """The request waits no more: placed, or gone."""
        return

    def joined(self, now: float, instance: Instance) -> Iterable[Decision]:
        """An instance takes requests, for the first time or again."""
        return ()

    def left(self, now: float, instance: Instance) -> Iterable[Decision]:
        """An instance is dead, gone, or to get empty, and is not to be chosen any more; said again
        when one that was to get empty is gone. Its requests are placed again after this, or, while
        it gets empty, at the end of their blocks (by `place`)."""
        return ()

    def load_changed(self, now: float, instance: Instance) -> None:
        """`instance.requests` and `instance.n_tokens` have changed."""
        return

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> Iterable[Decision]:
        """A pass made progress with these requests (those that ended are not among them)."""
        return ()

    def block_ending(self, now: float, request: Request) -> Instance | None:
        """Where the request is to run the block after the present one, asked once per block when
        two steps or fewer are left of it; None to stay."""
        return None

    def ended(self, now: float, request: Request, *, finished: bool) -> None:
        """The request is gone; `finished`: with its last token, not cancelled or failed."""
        return

    def told(self, now: float, answer: object) -> Iterable[Decision]:
        """An answer to an Inquire, maybe late, maybe never."""
        return ()

    def wake_at(self) -> float | None:
        """When to call `tick` next, if nothing else happens."""
        return None

    def tick(self, now: float) -> Iterable[Decision]:
        """The time of `wake_at` has come (load control, forecasts)."""
        return ()
