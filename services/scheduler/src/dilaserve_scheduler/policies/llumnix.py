"""Llumnix as the paper adapts it (section 5.1): INFaaS, and at the start of a block a request moves
to the least loaded instance where its steps are strictly faster.

At the start of a block the cache is rebuilt anyway, so that moving costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from dilaserve.messages import StepResult
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.policies.fastest import tp_degree
from dilaserve_scheduler.policies.infaas import Infaas
from dilaserve_scheduler.policies.options import PolicyOptions
from dilaserve_scheduler.policies.pricing import Pricing

__all__ = ["Llumnix", "faster_elsewhere"]


class Llumnix(Infaas):
    """The second baseline."""

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._pricing = Pricing(options.profiles, options.overhead)

    def stepped(
        self, now: float, instance: Instance, result: StepResult, requests: Sequence[Request]
    ) -> tuple[()]:
        """Learn what a pass takes."""
        self._pricing.observe(tp_degree(instance), result.n_tokens, result.latency_ms / 1000)
        return ()

    def block_ending(self, now: float, request: Request) -> Instance | None:
        """The least loaded instance, if that makes its steps faster."""
        return faster_elsewhere(request, self._instances.first(request.model_id), self._pricing)


def faster_elsewhere(
    request: Request, candidate: Instance | None, pricing: Pricing
) -> Instance | None:
    """The candidate, if it has room for the request and its pass over all full lengths is strictly
    shorter with it than the present one is (papers/algorithms.md, A.6)."""
    present = request.instance
    if present is None or candidate is None or candidate is present:
        return None
    if not candidate.has_room(request):
        return None
    now_s = pricing.seconds(tp_degree(present), present.n_tokens)
    then_s = pricing.seconds(tp_degree(candidate), candidate.n_tokens + request.n_tokens)
    return candidate if then_s < now_s else None
