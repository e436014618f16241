"""What an operator can set about policies; each takes what concerns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dilaserve.profiles import ProfileSet
from dilaserve_scheduler.policies.habits import interpolate

__all__ = ["GSM8K_ACCURACY", "GSM8K_STEPS_PER_TOKEN", "PolicyOptions"]

GSM8K_STEPS_PER_TOKEN = {0.5: 0.158, 0.6: 0.177, 0.7: 0.217, 0.8: 0.272, 0.9: 0.344}
"""LLaDA-8B on GSM8K, dual cache: means of the published step counts (130 requests, output 256;
TeDiServe artifact, analysis/gsm8k_oracle). What is assumed of a model before it was served."""

GSM8K_ACCURACY = {0.5: 0.659, 0.6: 0.717, 0.7: 0.770, 0.8: 0.789, 0.9: 0.789}
"""The same model at fixed thresholds (paper, Figure 3; 0.786 at 0.9, within the noise of 0.8)."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Common to all policies. Seconds and tokens."""

    threshold: float = 0.9
    """Confidence threshold of policies with a fixed one."""
    queue_limit: int = 1000
    """Requests that may wait for room before new ones are refused."""
    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    """Candidates of policies that choose, ascending."""
    slo_s: float = 30.0
    """Of requests without an SLO of their own."""
    profiles: ProfileSet | None = None
    """Latency profiles; None: pass latencies are learned from what passes take."""
    overhead: float | None = None
    """Factor on the profiles; None: learned."""
    steps_per_token: Mapping[float, float] = field(
        default_factory=lambda: dict(GSM8K_STEPS_PER_TOKEN)
    )
    """By threshold, before any steps were seen."""
    is_guess: bool = False
    """Whether that is of another model, for all that is known. Then `dilaserve` forgets it sooner,
    and first of all asks a predictor about those who arrive."""
    accuracy: Mapping[float, float] = field(default_factory=lambda: dict(GSM8K_ACCURACY))
    """By threshold, for policies that weigh it."""
    margin: float = 0.9
    """Share of its SLO that a request's own threshold is planned with."""
    delivery_s: float = 0.0
    """What lies between a request's last step and its client's having the answer."""
    refresh_tokens: int = 8
    """Newly unmasked tokens after which a request's remaining steps are predicted anew."""
    refresh_as_predicted: bool = False
    """Whether that holds only until the predictor says what its training found."""
    horizon_slos: float = 1.5
    """How far ahead arrivals are reckoned with, in SLOs of the mean arrival, as long as the lowest
    thresholds would be enough for them."""

    # Parts of `dilaserve`; without one it does there what the paper does, or nothing.
    load_control: bool = True
    """Whether caps follow the load of the cluster (Algorithm 2)."""
    deadline_control: bool = True
    """Whether thresholds follow each request's deadline (Algorithm 1)."""
    instance_seconds: bool = True
    """Whether load is measured in instance-seconds; in tokens, as in the paper, otherwise."""
    caps_at_next_step: bool = True
    """Whether a new cap holds from the next step on; else, as in the paper, when the request's
    predictions are refreshed or the requests on its instance change."""
    mixed_batches: bool = True
    """Whether a step is priced as the mean pass of the batch as it is; else recompute steps as if
    the whole batch recomputed, and cache steps as if nobody did."""
    limit_recomputes: bool = True
    """Whether rows that recompute are put off until few enough do so in one pass."""
    all_candidates: bool = True
    """Whether instances of all degrees are compared; else the least loaded with room is taken."""
    forecast: bool = True
    """Whether arrivals to come are reckoned with."""
    risk_aware: bool = True
    """Whether deadlines are checked against an upper quantile of the steps left, not the median."""
    give_up_hopeless: bool = True
    """Whether those who cannot be in time any more let the others pass."""

    def accuracies(self) -> list[float]:
        """Of the candidates; between two known thresholds linear."""
        return [interpolate(self.accuracy, threshold) for threshold in self.thresholds]
