"""The core's own knobs; the defaults are the contract of DESIGN sections 3 and 4."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CoreSettings"]


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Seconds, and counts."""

    dead_after_s: float = 2.0
    """Silence after which an instance counts as dead; infinite where nobody sends heartbeats."""
    gap_s: float = 0.5
    """Most that one message adds to the clock of silence: two heartbeats."""
    resend_after_s: float = 1.0
    """A command that a heartbeat does not confirm for so long is sent again."""
    n_patient_steps: float = 4.0
    """A request without progress for so many passes of its instance (and at least
    `resend_after_s`) is looked after."""
    reload_gap_s: float = 0.25
    """Least time between two sends of one request's credit because of a reread record."""
    n_unheeded: int = 3
    """Readings of a request's record without progress after which an owner that holds nothing at
    all counts as deaf: its heartbeats arrive, and it takes no commands."""
    n_unheeded_last: int = 15
    """The same where no other instance can take the request: it fails then."""
    max_attempts: int = 3
    """Deaths of its instance after which a request fails."""
    queue_timeout_s: float = math.inf
    """How long an admitted request may wait for an instance before it fails."""
    run_ahead: int | None = None
    """Steps that a worker may run by itself; None: to the end of the block."""
    reconcile_every_s: float = 5.0
    """Between two comparisons of memory with the store's active set."""
    forget_dead_after_s: float = 60.0
    """For so long a dead instance is shown in the status."""
    no_instance_retry_s: float = 5.0
    """Retry-After while no instance is live: about what a worker takes to start."""
