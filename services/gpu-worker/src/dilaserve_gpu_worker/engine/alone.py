"""Denoising one request from start to end with an engine of its own, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass

from dilaserve.messages import CacheMode
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.kv_pool import PAGE_TOKENS
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest
from dilaserve_gpu_worker.engine.validate import Limits
from dilaserve_gpu_worker.models.model import Model

REQUEST_ID = "alone"
WITHOUT_END = 2**31


@dataclass(frozen=True, slots=True)
class Denoised:
    """What became of a request."""

    sequence: list[int]
    """Prompt and output; the mask token where an EOS left positions masked."""
    nfe: int
    """Number of forward evaluations."""
    windows: list[list[int]]
    """Ids that each forward computed."""
    finish_reason: str | None


def engine_for_one(model: Model, *, cache_mode: CacheMode, n_tokens: int) -> Engine:
    """An engine with room for one request of `n_tokens` tokens, prompt and output."""
    return Engine(
        model,
        cache_mode=cache_mode,
        n_kv_tokens=n_tokens + PAGE_TOKENS,
        max_batch_tokens=n_tokens,
    )


def fresh_request(
    prompt: list[int], spec: DecodingSpec, credit: Credit, *, quota: int | None = None
) -> EngineRequest:
    """A request at step 0, under the id REQUEST_ID."""
    canvas = [MASKED] * spec.n_output
    return EngineRequest(REQUEST_ID, prompt, spec, 0, canvas, credit, quota)


def check_length(
    model: Model, prompt: list[int], spec: DecodingSpec, *, request_id: str = REQUEST_ID
) -> None:
    """Raises NeverFitsError for more tokens than the model takes, before a canvas and a KV pool of
    that length are made."""
    longest = model.config.max_sequence_length
    limits = Limits(model.config.vocab_size, longest, longest, n_kv_tokens=None)
    limits.check_fits(EngineRequest(request_id, prompt, spec, 0, [], Credit(0.0, 0)))


def denoise_alone(
    model: Model,
    prompt: list[int],
    spec: DecodingSpec,
    *,
    cache_mode: CacheMode,
    threshold: float,
    quota: int | None = None,
) -> Denoised:
    """Denoise one request, by threshold or, with a quota, that many tokens a step.

    Raises NeverFitsError and InvalidRequestError as Engine.add does.
    """
    check_length(model, prompt, spec)
    engine = engine_for_one(model, cache_mode=cache_mode, n_tokens=len(prompt) + spec.n_output)
    engine.add(fresh_request(prompt, spec, Credit(threshold, WITHOUT_END), quota=quota))
    windows: list[list[int]] = []
    finish_reason = None
    while (plan := engine.plan()) is not None:
        windows += [row.tokens.tolist() for row in plan.rows]
        output = engine.unmask(plan, engine.forward(plan))
        finish_reason = output.steps[-1].finish_reason
    mask_id = model.config.mask_id
    canvas = [mask_id if token == MASKED else token for token in engine.canvas(REQUEST_ID)]
    return Denoised([*prompt, *canvas], len(windows), windows, finish_reason)
