"""The scheduler's view of a request as a table: state × event → state. Absent pairs raise.

The stored lifecycle is `dilaserve.lifecycle`; here "moving" and the like say which answer of the
store is outstanding.
"""

from __future__ import annotations

from typing import Literal, get_args

from dilaserve.errors import LifecycleError

__all__ = ["EVENTS", "STATES", "TRANSITIONS", "RequestEvent", "RequestState", "next_state"]

RequestState = Literal["unknown", "submitting", "running", "moving", "parked", "failing", "done"]
RequestEvent = Literal["submit", "start", "park", "move", "readmit", "fail", "end"]

STATES: tuple[RequestState, ...] = get_args(RequestState)
EVENTS: tuple[RequestEvent, ...] = get_args(RequestEvent)

TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    # asked for by a gateway, or found active in the store
    ("unknown", "submit"): "submitting",
    ("unknown", "start"): "running",
    ("unknown", "park"): "parked",
    # `admit` is outstanding
    ("submitting", "start"): "running",
    ("submitting", "park"): "parked",
    ("submitting", "move"): "moving",
    ("submitting", "fail"): "failing",
    ("submitting", "end"): "done",
    # an instance owns it, and has its credit or is to get it when it is heard
    ("running", "move"): "moving",
    ("running", "readmit"): "submitting",
    ("running", "fail"): "failing",
    ("running", "end"): "done",
    # `reassign` is outstanding
    ("moving", "start"): "running",
    ("moving", "park"): "parked",
    ("moving", "move"): "moving",
    ("moving", "readmit"): "submitting",
    ("moving", "fail"): "failing",
    ("moving", "end"): "done",
    # nobody owns it; it waits for room
    ("parked", "move"): "moving",
    ("parked", "readmit"): "submitting",
    ("parked", "fail"): "failing",
    ("parked", "end"): "done",
    # `fail` is outstanding
    ("failing", "end"): "done",
}


def next_state(state: RequestState, event: RequestEvent) -> RequestState:
    """The state after `event`. Raises LifecycleError for a pair that the table lacks."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LifecycleError(
            f"event {event!r} is not allowed in state {state!r}; this is a bug of the scheduler, "
            "restart it and report the log"
        ) from None
