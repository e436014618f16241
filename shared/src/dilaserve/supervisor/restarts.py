"""When to start a dead child again, and when to stop trying. A pure decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays double with every death that came before the child was ready."""

    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    max_failures: int = 5
    """Deaths in a row before being ready, after which the child is given up."""

    def delay_s(self, n_failures: int) -> float | None:
        """Seconds to wait after `n_failures` deaths in a row before being ready (0: it had been
        ready when it died); None to give up."""
        if n_failures >= self.max_failures:
            return None
        doublings = max(n_failures - 1, 0)
        return float(min(self.first_delay_s * 2**doublings, self.longest_delay_s))
