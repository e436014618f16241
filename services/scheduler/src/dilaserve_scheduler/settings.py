"""The scheduler's settings: which policy, how far workers may run, and its patience."""

from __future__ import annotations

from typing import Annotated

from dilaserve.errors import SettingsError
from dilaserve.settings import CommonSettings
from dilaserve_scheduler.core.settings import CoreSettings
from dilaserve_scheduler.policies import PolicyOptions

__all__ = ["SchedulerSettings"]


class SchedulerSettings(CommonSettings, frozen=True, kw_only=True):
    """Read from DILASERVE_* variables, once, in `__main__`."""

    policy: Annotated[str, "who chooses instances and thresholds: infaas"] = "infaas"
    threshold: Annotated[float, "confidence threshold of policies with a fixed one"] = 0.9
    queue_limit: Annotated[int, "requests that may wait for room before others are refused"] = 1000
    run_ahead: Annotated[str, "how far workers go by themselves: block, or a number of steps"] = (
        "block"
    )
    dead_after_s: Annotated[float, "silence after which an instance counts as dead"] = 2.0
    lease_ttl_s: Annotated[float, "how long a dead scheduler keeps another from taking over"] = 2.0
    submit_timeout_s: Annotated[float, "longest wait for the store when admitting"] = 10.0
    start_timeout_s: Annotated[float, "how long to wait for NATS and Redis at the start"] = 30.0

    def core(self) -> CoreSettings:
        """What the core takes of them. Raises SettingsError."""
        if self.dead_after_s <= 0:
            raise SettingsError(
                f"DILASERVE_DEAD_AFTER_S={self.dead_after_s} is not above 0; use for example 2"
            )
        return CoreSettings(dead_after_s=self.dead_after_s, run_ahead=_run_ahead(self.run_ahead))

    def options(self) -> PolicyOptions:
        """What policies take of them. Raises SettingsError."""
        if not 0.0 <= self.threshold <= 1.0:
            raise SettingsError(
                f"DILASERVE_THRESHOLD={self.threshold} is not in 0..1; use for example 0.9"
            )
        return PolicyOptions(threshold=self.threshold, queue_limit=self.queue_limit)


def _run_ahead(text: str) -> int | None:
    if text == "block":
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise SettingsError(
        f"DILASERVE_RUN_AHEAD={text!r} is neither 'block' nor a number of steps; use for example 1"
    )
