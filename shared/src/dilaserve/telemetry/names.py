"""The registry of every metric: name, unit, labels, and which services emit it. Spans: spans.py.

Names with `vllm:` mean what they mean in vLLM, so that its dashboards carry over; what is new is
`dilaserve:`. Anyone adds rows; an undeclared name or label raises where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dilaserve.telemetry.spans import SPANS, Service, Span

__all__ = ["METRICS", "SPANS", "Metric", "Service", "Span"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Latencies of requests and steps."""
SHORT_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Decisions and round trips."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
SMALL_COUNTS = (1, 2, 5, 10, 20)
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric; `name` is what Prometheus sees, with `_total` on every counter."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """UCUM: `s`, `By`, `1` or an annotation such as `{token}`; seconds are in the name too."""
    help: str
    services: tuple[Service, ...]
    labels: tuple[str, ...] = ()
    """Each use gives exactly these."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, inclusive; histograms only."""


_METRICS = (
    # --- gateway -------------------------------------------------------------------------------
    Metric(
        "vllm:request_success_total",
        "counter",
        "{request}",
        "Requests finished, by reason: stop, length, abort (the client left) or error",
        ("gateway",),
        ("model_name", "finished_reason"),
    ),
    Metric(
        "vllm:prompt_tokens_total",
        "counter",
        "{token}",
        "Prompt tokens of admitted requests",
        ("gateway",),
        ("model_name",),
    ),
    Metric(
        "vllm:generation_tokens_total",
        "counter",
        "{token}",
        "Tokens generated, up to and without EOS",
        ("gateway",),
        ("model_name",),
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "s",
        "From arrival to the first text that can be streamed in order",
        ("gateway",),
        ("model_name",),
        SECONDS,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "s",
        "From arrival to the last token",
        ("gateway",),
        ("model_name",),
        SECONDS,
    ),
    Metric(
        "vllm:request_prompt_tokens",
        "histogram",
        "{token}",
        "Prompt length of a request",
        ("gateway",),
        ("model_name",),
        TOKENS,
    ),
    Metric(
        "vllm:request_generation_tokens",
        "histogram",
        "{token}",
        "Tokens generated for a request",
        ("gateway",),
        ("model_name",),
        TOKENS,
    ),
    Metric(
        "vllm:request_params_max_tokens",
        "histogram",
        "{token}",
        "Canvas length: max_tokens as asked for or by default",
        ("gateway",),
        ("model_name",),
        TOKENS,
    ),
    Metric(
        "vllm:request_params_n",
        "histogram",
        "{sequence}",
        "Siblings asked for by `n`",
        ("gateway",),
        ("model_name",),
        SMALL_COUNTS,
    ),
    Metric(
        "dilaserve:http_requests_total",
        "counter",
        "{request}",
        "HTTP requests answered, by route and status code",
        ("gateway",),
        ("route", "code"),
    ),
    Metric(
        "dilaserve:open_streams",
        "gauge",
        "{stream}",
        "Requests that a client is waiting for",
        ("gateway",),
    ),
    Metric(
        "dilaserve:slo_total",
        "counter",
        "{request}",
        "Calls with an SLO, from arrival to the last token, by tier and outcome: met, or missed "
        "(the admitted that failed included)",
        ("gateway",),
        ("model_name", "service_tier", "outcome"),
    ),
    Metric(
        "dilaserve:request_threshold",
        "histogram",
        "1",
        "Mean confidence threshold over the steps of a finished request",
        ("gateway",),
        ("model_name",),
        THRESHOLDS,
    ),
    Metric(
        "dilaserve:request_migrations_total",
        "counter",
        "{migration}",
        "Times that a finished request went on on another instance",
        ("gateway",),
        ("model_name",),
    ),
    Metric(
        "dilaserve:stream_reads_total",
        "counter",
        "{read}",
        "Times that deltas were read from the store, by cause: gap or silence",
        ("gateway",),
        ("cause",),
    ),
    # --- scheduler -----------------------------------------------------------------------------
    Metric(
        "vllm:num_requests_waiting",
        "gauge",
        "{request}",
        "Admitted requests that no instance holds (parked)",
        ("scheduler",),
        ("model_name",),
    ),
    Metric(
        "dilaserve:admissions_total",
        "counter",
        "{request}",
        "Answers to Submit: admitted, or the code of a refusal",
        ("scheduler",),
        ("outcome",),
    ),
    Metric(
        "dilaserve:reassignments_total",
        "counter",
        "{request}",
        "Changes of a request's owner, by cause",
        ("scheduler",),
        ("cause",),
    ),
    Metric(
        "dilaserve:instances",
        "gauge",
        "{instance}",
        "Instances by state: live, dead or draining",
        ("scheduler",),
        ("state",),
    ),
    Metric(
        "dilaserve:live_instances",
        "gauge",
        "{instance}",
        "Live instances by tensor-parallel degree",
        ("scheduler",),
        ("tp_degree",),
    ),
    Metric(
        "dilaserve:commands_total",
        "counter",
        "{command}",
        "StepCommands sent",
        ("scheduler",),
    ),
    Metric(
        "dilaserve:fenced_results_total",
        "counter",
        "{request}",
        "Steps that workers reported as fenced",
        ("scheduler",),
    ),
    Metric(
        "dilaserve:failures_total",
        "counter",
        "{request}",
        "Requests given up: poison, never_fits, invalid, unheeded (its owner takes no commands), "
        "timed_out (nobody took it), or cancelled while being admitted",
        ("scheduler",),
        ("cause",),
    ),
    Metric(
        "dilaserve:scheduler_term",
        "gauge",
        "1",
        "Term of the lease held; 0 while another scheduler leads",
        ("scheduler",),
    ),
    Metric(
        "dilaserve:decision_seconds",
        "histogram",
        "s",
        "Time that the core takes over one event",
        ("scheduler",),
        ("event",),
        SHORT_SECONDS,
    ),
    # --- gpu-worker ----------------------------------------------------------------------------
    Metric(
        "vllm:num_requests_running",
        "gauge",
        "{request}",
        "Requests held by the instance",
        ("gpu-worker",),
        ("model_name",),
    ),
    Metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "1",
        "Share of the KV pool in use, 0 to 1; 0 without a cache",
        ("gpu-worker",),
        ("model_name",),
    ),
    Metric(
        "vllm:iteration_tokens_total",
        "histogram",
        "{token}",
        "Rows of the flat token axis in one forward pass",
        ("gpu-worker",),
        ("model_name",),
        TOKENS,
    ),
    Metric(
        "dilaserve:steps_total",
        "counter",
        "{step}",
        "Denoising steps of requests, by kind (recompute or cache) and TP degree",
        ("gpu-worker",),
        ("kind", "tp_degree"),
    ),
    Metric(
        "dilaserve:step_seconds",
        "histogram",
        "s",
        "Duration of one forward pass with its unmasking",
        ("gpu-worker",),
        ("tp_degree",),
        SECONDS,
    ),
    Metric(
        "dilaserve:step_threshold",
        "histogram",
        "1",
        "Confidence threshold of each request's step",
        ("gpu-worker",),
        (),
        THRESHOLDS,
    ),
    Metric(
        "dilaserve:tokens_unmasked_total",
        "counter",
        "{token}",
        "Tokens unmasked and committed",
        ("gpu-worker",),
    ),
    Metric(
        "dilaserve:rebuilds_total",
        "counter",
        "{row}",
        "Passes of a request that only rebuilt its KV cache",
        ("gpu-worker",),
    ),
    Metric(
        "dilaserve:commits_total",
        "counter",
        "{commit}",
        "Commits by the store's answer: committed, duplicate, fenced, gap or terminal",
        ("gpu-worker",),
        ("outcome",),
    ),
    Metric(
        "dilaserve:commit_seconds",
        "histogram",
        "s",
        "Round trip of one batch of commits",
        ("gpu-worker",),
        (),
        SHORT_SECONDS,
    ),
    # --- predictor -----------------------------------------------------------------------------
    Metric(
        "dilaserve:prediction_requests_total",
        "counter",
        "{request}",
        "Requests asked about: answered, untrained (there is no predictor yet) or other_model",
        ("predictor",),
        ("outcome",),
    ),
    Metric(
        "dilaserve:prediction_batch_requests",
        "histogram",
        "{request}",
        "Requests predicted together",
        ("predictor",),
        (),
        TOKENS,
    ),
    Metric(
        "dilaserve:prediction_seconds",
        "histogram",
        "s",
        "Features and trees of one batch",
        ("predictor",),
        (),
        SHORT_SECONDS,
    ),
    Metric(
        "dilaserve:predictor_wmape",
        "gauge",
        "1",
        "Sum of absolute errors over sum of truths: `served`, of the last 2,000 predictions that "
        "could be compared, beside `trained`, on prompts held out; drift is their distance",
        ("predictor",),
        ("model_name", "basis"),
    ),
    Metric(
        "dilaserve:predictor_upper_coverage",
        "gauge",
        "1",
        "Share of the truths at or below the upper quantile predicted; basis as for the WMAPE",
        ("predictor",),
        ("model_name", "basis"),
    ),
    Metric(
        "dilaserve:predictions_compared_total",
        "counter",
        "{prediction}",
        "Predictions held against what happened, until the request's end or a change of threshold",
        ("predictor",),
        ("until",),
    ),
    Metric(
        "dilaserve:predictor_loads_total",
        "counter",
        "{load}",
        "Times that the predictor's folder held something new: loaded or unusable",
        ("predictor",),
        ("outcome",),
    ),
    Metric(
        "dilaserve:recorded_runs_total",
        "counter",
        "{run}",
        "Served requests that ended while recording: written, incomplete (results lost) or failed",
        ("predictor",),
        ("outcome",),
    ),
    # --- every service -------------------------------------------------------------------------
    Metric(
        "dilaserve:messages_dropped_total",
        "counter",
        "{message}",
        "Messages dropped: unknown tag or malformed (`invalid`), `stale`, or `unsent`: no bus",
        ("gateway", "scheduler", "gpu-worker", "predictor"),
        ("reason",),
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}
