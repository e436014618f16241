"""The registry of every span: what it covers, its parent, and the attributes that it may carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Service = Literal["gateway", "scheduler", "gpu-worker", "predictor", "reconfigurator"]


@dataclass(frozen=True, slots=True)
class Span:
    """A declared span and the attributes that it may carry."""

    name: str
    help: str
    services: tuple[Service, ...]
    parent: str
    """Name of the parent span, `remote` for the client's, empty for none."""
    attributes: tuple[str, ...] = ()


_SPANS = (
    Span(
        "gateway.request",
        "A request from its arrival to its last token; GenAI semantic conventions",
        ("gateway",),
        parent="remote",
        attributes=(
            "gen_ai.operation.name",
            "gen_ai.provider.name",
            "gen_ai.request.model",
            "gen_ai.request.max_tokens",
            "gen_ai.request.temperature",
            "gen_ai.request.top_p",
            "gen_ai.request.seed",
            "gen_ai.request.choice.count",
            "gen_ai.request.stop_sequences",
            "gen_ai.response.id",
            "gen_ai.response.model",
            "gen_ai.response.finish_reasons",
            "gen_ai.usage.input_tokens",
            "gen_ai.usage.output_tokens",
            "error.type",
            "http.request.method",
            "http.response.status_code",
            "http.route",
            "dilaserve.request_id",
        ),
    ),
    Span(
        "scheduler.admit",
        "Admission of a request: policy, store, first command",
        ("scheduler",),
        parent="gateway.request",
        attributes=(
            "dilaserve.request_id",
            "dilaserve.instance_id",
            "dilaserve.threshold",
            "dilaserve.outcome",
        ),
    ),
    Span(
        "scheduler.reassign",
        "A change of owner: of a dead instance, of a drained one, or for a gain",
        ("scheduler",),
        parent="gateway.request",
        attributes=(
            "dilaserve.request_id",
            "dilaserve.instance_id",
            "dilaserve.epoch",
            "dilaserve.cause",
            "dilaserve.outcome",
        ),
    ),
    Span(
        "worker.request",
        "A request at one epoch on one instance, from load to release",
        ("gpu-worker",),
        parent="scheduler.admit",
        attributes=(
            "dilaserve.request_id",
            "dilaserve.instance_id",
            "dilaserve.epoch",
            "dilaserve.steps",
            "dilaserve.outcome",
        ),
    ),
    Span(
        "worker.step",
        "One forward pass of a batch, linked to the worker.request of each member",
        ("gpu-worker",),
        parent="",
        attributes=(
            "dilaserve.instance_id",
            "dilaserve.n_requests",
            "dilaserve.n_tokens",
            "dilaserve.n_rebuilds",
            "dilaserve.tp_degree",
        ),
    ),
)

SPANS: dict[str, Span] = {span.name: span for span in _SPANS}
