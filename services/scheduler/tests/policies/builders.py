"""Instances, requests, results and a profile whose numbers can be checked by hand."""

from __future__ import annotations

from typing import Any

from dilaserve.messages import ConfidenceStats, StepItemResult, StepKind, StepResult
from dilaserve.profiles import LatencyProfile, Point, ProfileSet
from dilaserve_scheduler.core.model import Instance, Request
from dilaserve_scheduler.policies import PolicyOptions

from ..driver import info

STATS = ConfidenceStats(min=0.1, q25=0.2, median=0.5, mean=0.5, q75=0.8)


def profiles() -> ProfileSet:
    """TP 1: 10 ms and then 0.1 ms a token; TP 2: half of that."""
    return ProfileSet(
        model="m",
        device="d",
        profiles=[
            LatencyProfile(tp_degree=1, points=[Point(100, 0.010), Point(1100, 0.110)]),
            LatencyProfile(tp_degree=2, points=[Point(100, 0.005), Point(1100, 0.055)]),
        ],
    )


def options(**changes: Any) -> PolicyOptions:
    """Two candidates: half a step a token at 0.5, one at 0.9."""
    values: dict[str, Any] = {
        "thresholds": (0.5, 0.9),
        "steps_per_token": {0.5: 0.5, 0.9: 1.0},
        "accuracy": {0.5: 0.6, 0.9: 0.8},
        "profiles": profiles(),
        "overhead": 1.0,
        "slo_s": 10.0,
        "margin": 1.0,
    }
    return PolicyOptions(**(values | changes))


def make_instance(number: int = 1, *, tp_degree: int = 1, budget: int = 256) -> Instance:
    """A live one with blocks of 8 and a dual cache."""
    instance = Instance(f"i-{number:04}", "i", number, state="live")
    sizes = {"max_batch_tokens": budget, "n_kv_tokens": budget, "max_sequence_length": budget}
    instance.learn(info(instance.instance_id, tp_degree=tp_degree, **sizes))
    return instance


def make_request(name: str = "r", **changes: Any) -> Request:
    """16 + 16 tokens in two blocks of 8."""
    values: dict[str, Any] = {
        "model_id": "m",
        "n_prompt": 16,
        "n_output": 16,
        "block_length": 8,
        "arrival_s": 0.0,
    }
    return Request(name, **(values | changes))


def seat(request: Request, instance: Instance) -> None:
    """Put a request on an instance, as the core does."""
    request.state, request.instance = "running", instance
    instance.requests[request.request_id] = request
    instance.n_tokens += request.n_tokens


def advance(request: Request, n_new: int) -> None:
    """A step unmasks so many tokens of the present block."""
    request.step += 1
    request.n_unmasked += n_new
    request.n_block_masked -= n_new
    if request.n_block_masked == 0 and request.block + 1 < request.n_blocks:
        request.block += 1
        request.n_block_masked = request.block_size(request.block)


def result(
    instance: Instance,
    *requests: Request,
    n_new: int = 1,
    threshold: float = 0.9,
    kind: StepKind = "cache",
    latency_ms: float = 10.0,
    n_tokens: int = 32,
) -> StepResult:
    """The pass that the requests have just run."""
    return StepResult(
        instance_id=instance.instance_id,
        batch=1,
        latency_ms=latency_ms,
        n_tokens=n_tokens,
        items=[
            StepItemResult(
                request_id=request.request_id,
                epoch=1,
                step=request.step,
                block=request.block,
                kind=kind,
                threshold=threshold,
                outcome="committed",
                n_new=n_new,
                n_unmasked=request.n_unmasked,
                n_block_masked=request.n_block_masked,
                confidence=STATS,
            )
            for request in requests
        ],
    )
