"""The scheduler's settings: which policy, how far workers may run, and its patience."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dilaserve.errors import SettingsError
from dilaserve.profiles import load_profiles
from dilaserve.settings import NOT_NEGATIVE, POSITIVE, CommonSettings
from dilaserve_scheduler.core.settings import CoreSettings
from dilaserve_scheduler.policies import PolicyOptions

__all__ = ["SchedulerSettings"]


class SchedulerSettings(CommonSettings, frozen=True, kw_only=True):
    """Read from DILASERVE_* variables, once, in `__main__`."""

    policy: Annotated[
        str,
        "who chooses instances and thresholds: dilaserve, tediserve, infaas, llumnix or proteus",
    ] = "dilaserve"
    thresholds: Annotated[
        str, "candidate confidence thresholds of policies that choose, ascending"
    ] = "0.5,0.6,0.7,0.8,0.9"
    slo_ms: Annotated[int, "SLO of requests that bring none, in milliseconds"] = 30000
    margin: Annotated[float, "share of its SLO that a request's threshold is planned with"] = 0.9
    delivery_ms: Annotated[
        int,
        "milliseconds from a request's last step to its client's having the answer; `dilaserve` "
        "keeps them free before each deadline, but at most a tenth of the SLO",
        NOT_NEGATIVE,
    ] = 50
    profile: Annotated[
        str, "latency profile (dilaserve profile); empty: learned from what passes take"
    ] = ""
    overhead: Annotated[
        float, "factor on the profile for what is lost beside the pass; 0: learned"
    ] = 0.0
    refresh_tokens: Annotated[
        int,
        "newly unmasked tokens after which remaining steps are predicted anew; 0: as the predictor "
        "found in its training, by the paper's 5 % rule",
        NOT_NEGATIVE,
    ] = 0
    threshold: Annotated[float, "confidence threshold of policies with a fixed one"] = 0.9
    queue_limit: Annotated[
        int, "requests that may wait for room before others are refused", NOT_NEGATIVE
    ] = 1000
    queue_timeout_s: Annotated[
        float, "how long an admitted request may wait for an instance before it fails", POSITIVE
    ] = 300.0
    run_ahead: Annotated[str, "how far workers go by themselves: block, or a number of steps"] = (
        "block"
    )
    dead_after_s: Annotated[float, "silence after which an instance counts as dead", POSITIVE] = 2.0
    lease_ttl_s: Annotated[
        float, "how long a dead scheduler keeps another from taking over", POSITIVE
    ] = 2.0
    submit_timeout_s: Annotated[float, "longest wait for the store when admitting", POSITIVE] = 10.0
    start_timeout_s: Annotated[
        float, "how long to wait for NATS and Redis at the start", NOT_NEGATIVE
    ] = 30.0

    def core(self) -> CoreSettings:
        """What the core takes of them. Raises SettingsError."""
        if self.dead_after_s <= 0:
            raise SettingsError(
                f"DILASERVE_DEAD_AFTER_S={self.dead_after_s} is not above 0; use for example 2"
            )
        return CoreSettings(
            dead_after_s=self.dead_after_s,
            queue_timeout_s=self.queue_timeout_s,
            run_ahead=_run_ahead(self.run_ahead),
        )

    def options(self) -> PolicyOptions:
        """What policies take of them. Raises SettingsError, and ProfileError for a profile that
        cannot be used."""
        self._check()
        return PolicyOptions(
            threshold=self.threshold,
            queue_limit=self.queue_limit,
            thresholds=_thresholds(self.thresholds),
            slo_s=self.slo_ms / 1000,
            profiles=load_profiles(Path(self.profile)) if self.profile else None,
            overhead=self.overhead or None,
            is_guess=True,
            margin=self.margin,
            delivery_s=self.delivery_ms / 1000,
            refresh_tokens=self.refresh_tokens or PolicyOptions().refresh_tokens,
            refresh_as_predicted=not self.refresh_tokens,
        )

    def _check(self) -> None:
        checks = {
            "THRESHOLD": (self.threshold, 0.0 <= self.threshold <= 1.0, "in 0..1", "0.9"),
            "SLO_MS": (self.slo_ms, self.slo_ms > 0, "above 0", "30000"),
            "MARGIN": (self.margin, 0.0 < self.margin <= 1.0, "in 0..1 and above 0", "0.9"),
            "OVERHEAD": (self.overhead, self.overhead >= 0.0, "0 or more", "1.2"),
        }
        for name, (value, is_right, rule, example) in checks.items():
            if not is_right:
                raise SettingsError(
                    f"DILASERVE_{name}={value} is not {rule}; use for example {example}"
                )


def _thresholds(text: str) -> tuple[float, ...]:
    example = "use for example 0.5,0.6,0.7,0.8,0.9"
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"DILASERVE_THRESHOLDS={text!r} are no numbers; {example}") from None
    if list(values) != sorted(set(values)) or not all(0.0 < value <= 1.0 for value in values):
        raise SettingsError(
            f"DILASERVE_THRESHOLDS={text!r} are not ascending numbers in 0..1; {example}"
        )
    return values


def _run_ahead(text: str) -> int | None:
    if text == "block":
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise SettingsError(
        f"DILASERVE_RUN_AHEAD={text!r} is neither 'block' nor a number of steps; use for example 1"
    )
