"""Spans and metrics of one call, under GenAI conventions and vLLM's names. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from dilaserve.telemetry import Telemetry, extract, inject
from dilaserve_gateway.ask import Ask
from dilaserve_gateway.choice import Choice, Update
from dilaserve_gateway.course import meets_slo


class Observation:
    """From a call's arrival to its end; `end` may be called twice, the first counts."""

    def __init__(
        self,
        telemetry: Telemetry,
        clock: Callable[[], float],
        *,
        model_id: str,
        request_id: str,
        ask: Ask,
        headers: Mapping[str, str],
        arrived_s: float,
    ) -> None:
        """`headers` are the client's: a `traceparent` among them becomes the parent. `arrived_s`
        is on `clock`."""
        self.latency_s: float | None = None
        """From arrival to the last token of all choices; None before."""
        self._telemetry = telemetry
        self._clock = clock
        self._model_id = model_id
        self._ask = ask
        self._arrived_s = arrived_s
        self._n_open = ask.n_choices
        self._is_admitted = False
        self._has_text = False
        self._ended = False
        self._span = self._start_span(request_id, extract(headers))

    def trace_headers(self) -> dict[str, str]:
        """Headers that make what they are sent with a child of the call."""
        return inject(self._context)

    def admitted(self) -> None:
        """All choices are admitted."""
        self._is_admitted = True
        telemetry, ask, model = self._telemetry, self._ask, self._model_id
        telemetry.count("vllm:prompt_tokens_total", ask.n_prompt, model_name=model)
        for prompt in ask.prompts:
            telemetry.observe("vllm:request_prompt_tokens", len(prompt), model_name=model)
        telemetry.observe("vllm:request_params_max_tokens", ask.n_output, model_name=model)
        telemetry.observe("vllm:request_params_n", ask.n, model_name=model)

    def updated(self, update: Update) -> None:
        """The first text sets the time to the first token, the last choice's end the latency."""
        if update.text and not self._has_text:
            self._has_text = True
            self._telemetry.observe(
                "vllm:time_to_first_token_seconds", self._age_s(), model_name=self._model_id
            )
        self._n_open -= update.finish_reason is not None
        if self._n_open == 0 and self.latency_s is None:
            self.latency_s = self._age_s()

    def end(self, choices: list[Choice], error: BaseException | None, *, left: bool) -> None:
        """Every choice has finished, or `error` ended the call, or the client has `left`."""
        if self._ended:
            return
        self._ended = True
        unfinished = "error" if error is not None else "abort"
        for choice in choices:
            self._count(choice, choice.finish_reason or unfinished)
        if error is not None and self._is_admitted:
            self._count_slo(is_met=False)
        elif error is None and not left:
            self._observe_end(choices)
        self._end_span(choices, error)

    def _count(self, choice: Choice, reason: str) -> None:
        model = self._model_id
        self._telemetry.count(
            "vllm:request_success_total", model_name=model, finished_reason=reason
        )
        self._telemetry.count("vllm:generation_tokens_total", choice.n_tokens, model_name=model)
        if choice.finish_reason is not None:
            self._telemetry.observe(
                "vllm:request_generation_tokens", choice.n_tokens, model_name=model
            )

    def _observe_end(self, choices: list[Choice]) -> None:
        model, latency_s = self._model_id, self.latency_s or self._age_s()
        self._telemetry.observe("vllm:e2e_request_latency_seconds", latency_s, model_name=model)
        self._count_slo(is_met=meets_slo(self._ask.level, latency_s))
        for choice in choices:
            course = choice.course
            self._telemetry.count(
                "dilaserve:request_migrations_total", course.n_migrations, model_name=model
            )
            if course.mean_threshold is not None:
                self._telemetry.observe(
                    "dilaserve:request_threshold", course.mean_threshold, model_name=model
                )

    def _count_slo(self, *, is_met: bool) -> None:
        level = self._ask.level
        if level.slo_ms is not None:
            self._telemetry.count(
                "dilaserve:slo_total",
                model_name=self._model_id,
                service_tier=level.service_tier,
                outcome="met" if is_met else "missed",
            )

    def _age_s(self) -> float:
        return self._clock() - self._arrived_s

    @property
    def _context(self) -> Context:
        return set_span_in_context(self._span, Context())

    def _start_span(self, request_id: str, parent: Context) -> Span:
        ask = self._ask
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": ask.operation,
            "gen_ai.provider.name": "dilaserve",
            "gen_ai.request.model": self._model_id,
            "gen_ai.request.max_tokens": ask.n_output,
            "gen_ai.request.temperature": ask.temperature,
            "gen_ai.request.top_p": ask.top_p,
            "gen_ai.request.seed": ask.seed,
            "gen_ai.request.choice.count": ask.n_choices,
            "gen_ai.response.id": request_id,
            "gen_ai.response.model": self._model_id,
            "dilaserve.request_id": request_id,
        }
        span = self._telemetry.tracer.start_span(
            "gateway.request", parent, SpanKind.SERVER, attributes
        )
        if ask.stops:
            span.set_attribute("gen_ai.request.stop_sequences", ask.stops)
        return span

    def _end_span(self, choices: list[Choice], error: BaseException | None) -> None:
        span = self._span
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("gen_ai.usage.input_tokens", self._ask.n_prompt)
        span.set_attribute("gen_ai.usage.output_tokens", sum(c.n_tokens for c in choices))
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()
