"""The registry of every metric: name, unit, labels, and which services emit it. The rows of the
gateway are in gateway_names.py, spans in spans.py.

Names with `vllm:` mean what they mean in vLLM, so that its dashboards carry over; what is new is
`dilaserve:`. Anyone adds rows; an undeclared name or label raises where it is used.
"""

from __future__ import annotations

from dilaserve.telemetry.gateway_names import GATEWAY_METRICS
from dilaserve.telemetry.metric import (
    SECONDS,
    SHORT_SECONDS,
    THRESHOLDS,
    TOKENS,
    Metric,
)
from dilaserve.telemetry.spans import SPANS, Service, Span

__all__ = ["METRICS", "SPANS", "Metric", "Service", "Span"]


_METRICS = (
    *GATEWAY_METRICS,
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
        "Confidence threshold of a step: of one request of each pass, in turn",
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
    # --- reconfigurator ------------------------------------------------------------------------
    Metric(
        "dilaserve:plans_total",
        "counter",
        "{plan}",
        "Plans made: change, keep, hold (nothing to decide with) or failed",
        ("reconfigurator",),
        ("verdict",),
    ),
    Metric(
        "dilaserve:plan_seconds",
        "histogram",
        "s",
        "Making one plan: both stages and the present mix",
        ("reconfigurator",),
        (),
        SECONDS,
    ),
    Metric(
        "dilaserve:plans_applied_total",
        "counter",
        "{plan}",
        "Plans that were to be carried out: done, given_up, or cut_short (an instance died)",
        ("reconfigurator",),
        ("outcome",),
    ),
    Metric(
        "dilaserve:plan_execution_seconds",
        "histogram",
        "s",
        "Carrying one plan out",
        ("reconfigurator",),
        (),
        SECONDS,
    ),
    Metric(
        "dilaserve:plan_pause_seconds_total",
        "counter",
        "s",
        "While plans were carried out: time in which fewer GPUs served than the floor wants, or "
        "none",
        ("reconfigurator",),
    ),
    Metric(
        "dilaserve:plan_objective",
        "gauge",
        "1",
        "Of the last plan solved: mean_threshold, then slo_share (of its SLO that a mean request "
        "takes), for the best mix",
        ("reconfigurator",),
        ("objective",),
    ),
    Metric(
        "dilaserve:plan_gap",
        "gauge",
        "1",
        "Distance of that objective to its bound, relative to it",
        ("reconfigurator",),
        ("objective",),
    ),
    # --- every service -------------------------------------------------------------------------
    Metric(
        "dilaserve:messages_dropped_total",
        "counter",
        "{message}",
        "Messages dropped: unknown tag or malformed (`invalid`), `stale`, or `unsent`: no bus",
        ("gateway", "scheduler", "gpu-worker", "predictor", "reconfigurator"),
        ("reason",),
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}
