"""What a service tier means here: a priority and an SLO, unless the client says otherwise.

The names are OpenAI's. Knows no HTTP and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dilaserve.store.records import ServiceLevel
from dilaserve_gateway.settings import GatewaySettings

__all__ = ["SERVED_AS", "Asked", "AskedTier", "Tiers", "UsedTier", "tiers_of"]

AskedTier = Literal["auto", "default", "flex", "scale", "priority"]
UsedTier = Literal["default", "flex", "priority"]

SERVED_AS: dict[AskedTier, UsedTier] = {
    "auto": "default",
    "default": "default",
    "scale": "default",
    "flex": "flex",
    "priority": "priority",
}
"""`scale` is capacity that a customer has bought; nothing is set aside here, so it is `default`, as
OpenAI serves it to those who bought none. The answer names the tier that was used."""


@dataclass(frozen=True, slots=True)
class Tier:
    """`slo_factor` is on the default SLO."""

    priority: int
    slo_factor: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client said of latency and quality; None where it said nothing."""

    slo_ms: int | None = None
    priority: int | None = None
    service_tier: AskedTier | None = None
    min_confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one gateway. `slo_ms` is the SLO of the default tier."""

    slo_ms: int
    tiers: dict[UsedTier, Tier]

    def level(self, asked: Asked) -> ServiceLevel:
        """The level of a request: its own values, else its tier's."""
        name = SERVED_AS[asked.service_tier or "auto"]
        tier = self.tiers[name]
        slo_ms = max(1, round(self.slo_ms * tier.slo_factor))
        return ServiceLevel(
            slo_ms=slo_ms if asked.slo_ms is None else asked.slo_ms,
            priority=tier.priority if asked.priority is None else asked.priority,
            service_tier=name,
            min_confidence=asked.min_confidence,
        )


def tiers_of(settings: GatewaySettings) -> Tiers:
    """As the operator has set them."""
    return Tiers(
        settings.slo_ms,
        {
            "default": Tier(0, 1.0),
            "flex": Tier(settings.flex_priority, settings.flex_slo_factor),
            "priority": Tier(settings.priority_priority, settings.priority_slo_factor),
        },
    )
