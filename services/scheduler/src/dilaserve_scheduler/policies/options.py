"""What an operator can set about policies; each takes what concerns it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PolicyOptions"]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Common to all policies."""

    threshold: float = 0.9
    """Confidence threshold of policies with a fixed one."""
    queue_limit: int = 1000
    """Requests that may wait for room before new ones are refused."""
