"""The NATS subjects of DESIGN section 4, the only place that spells them."""

from __future__ import annotations

PREFIX = "dlm.v1"

REQUEST_SUBMIT = f"{PREFIX}.req.submit"
REQUEST_CANCEL = f"{PREFIX}.req.cancel"
STATUS = f"{PREFIX}.ctl.status"
PREDICT_STEPS = f"{PREFIX}.pred.steps"
DRAIN = f"{PREFIX}.ctl.drain"
PLAN_PROPOSED = f"{PREFIX}.plan.proposed"
PLAN_APPLIED = f"{PREFIX}.plan.applied"

ALL_STEP_RESULTS = f"{PREFIX}.evt.*.step"
ALL_WORKER_EVENTS = f"{PREFIX}.evt.>"


def command_step(instance_id: str) -> str:
    """Where the scheduler sends an instance its StepCommands."""
    return f"{PREFIX}.cmd.{instance_id}.step"


def command_stop(instance_id: str) -> str:
    """Where whoever launched an instance asks it to end its process."""
    return f"{PREFIX}.cmd.{instance_id}.stop"


def event_step(instance_id: str) -> str:
    """Where an instance reports a StepResult."""
    return f"{PREFIX}.evt.{instance_id}.step"


def event_up(instance_id: str) -> str:
    """Where an instance says that it has joined."""
    return f"{PREFIX}.evt.{instance_id}.up"


def event_heartbeat(instance_id: str) -> str:
    """Where an instance says that it is alive, and what it holds."""
    return f"{PREFIX}.evt.{instance_id}.hb"


def event_down(instance_id: str) -> str:
    """Where an instance says that it leaves on purpose."""
    return f"{PREFIX}.evt.{instance_id}.down"


def tokens(gateway_id: str) -> str:
    """Where workers publish the TokenDeltas of a gateway's requests."""
    return f"{PREFIX}.tok.{gateway_id}"
