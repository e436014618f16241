"""Commands of the worker's distribution: `dilaserve denoise` and `dilaserve replay`.

Torch is imported when a command runs, not when it is found.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dilaserve.addresses import stack_home
from dilaserve.commands.connect import store_of_stack
from dilaserve.errors import InvalidRequestError
from dilaserve.messages import CacheMode
from dilaserve.model_folder import find_model
from dilaserve.store.records import DecodingSpec, Delta, RequestRecord
from dilaserve.supervisor.state import running_state
from dilaserve_gpu_worker.options import Device, Dtype, Model, PackWeights, Threads

if TYPE_CHECKING:
    from dilaserve_gpu_worker.engine.alone import Denoised
    from dilaserve_gpu_worker.replay import Difference, ReplayReport

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def denoise(
    prompt_ids: Annotated[str, typer.Option(help="Token ids of the prompt, such as 1,2,3.")],
    output_len: Annotated[int, typer.Option(min=1, help="Length of the canvas in tokens.")],
    model: Model = None,
    block: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 32,
    threshold: Annotated[
        float | None,
        typer.Option(help="Unmask what is more confident than this; 0.9 without --quota."),
    ] = None,
    quota: Annotated[
        int | None, typer.Option(min=1, help="Unmask this many tokens a step instead.")
    ] = None,
    cache: Annotated[CacheMode, typer.Option(help="Which keys and values to keep.")] = "dual",
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="End at an EOS; by default it is ignored.")
    ] = False,
    threads: Threads = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    pack_weights: PackWeights = "auto",
    as_json: AsJson = False,
) -> None:
    """Denoise token ids with a model folder alone, without a stack."""
    if threshold is not None and quota is not None:
        raise typer.BadParameter("--threshold and --quota exclude each other; give one of them")
    if threshold is not None and not 0 <= threshold <= 1:
        raise typer.BadParameter(f"--threshold {threshold} is not from 0 to 1; use for example 0.9")
    prompt, folder = _parse_ids(prompt_ids), model or find_model(None, os.environ)
    from dilaserve_gpu_worker.engine.alone import denoise_alone
    from dilaserve_gpu_worker.loading import load_alone

    answer = denoise_alone(
        load_alone(folder, threads=threads, device=device, dtype=dtype, pack_weights=pack_weights),
        prompt,
        DecodingSpec(n_output=output_len, block_length=block, seed=0, ignore_eos=not stop_at_eos),
        cache_mode=cache,
        threshold=0.9 if threshold is None else threshold,
        quota=quota,
    )
    typer.echo(_denoised_json(answer) if as_json else _denoised_text(answer, len(prompt)))


def replay(
    request_id: Annotated[str, typer.Argument(help="Id of a request that the store still has.")],
    model: Annotated[
        Path | None, typer.Option(help="Model folder; default: that of the stack here.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Store to read; default: that of the stack here.")
    ] = None,
    threads: Threads = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    pack_weights: PackWeights = "auto",
    as_json: AsJson = False,
) -> None:
    """Denoise a served request again from its record; exit code 1 if the text differs."""
    record, deltas = asyncio.run(_load(redis_url, request_id))
    cache_mode = _only_cache_mode(deltas)
    from dilaserve_gpu_worker.engine.alone import engine_for_one
    from dilaserve_gpu_worker.loading import load_alone
    from dilaserve_gpu_worker.replay import RecordedStep, reproduce

    loaded = load_alone(
        _model_folder(model),
        threads=threads, device=device, dtype=dtype, pack_weights=pack_weights,
    )  # fmt: skip
    prompt, spec = record.request.prompt, record.request.spec
    n_tokens = len(prompt) + spec.n_output
    report = reproduce(
        lambda: engine_for_one(loaded, cache_mode=cache_mode, n_tokens=n_tokens),
        prompt,
        spec,
        msgspec.convert(deltas, list[RecordedStep], from_attributes=True),
        record.canvas,
    )
    if as_json:
        typer.echo(_report_json(request_id, report))
    else:
        typer.echo("\n".join(_report_lines(request_id, record, report)))
    if not report.agrees:
        raise typer.Exit(1)


def _only_cache_mode(deltas: list[Delta]) -> CacheMode:
    modes = {delta.cache_mode for delta in deltas}
    if len(modes) > 1:
        raise InvalidRequestError(
            f"it was served in the cache modes {', '.join(sorted(modes))} in turn, and cannot be "
            "replayed by one engine; give all workers one DILASERVE_CACHE_MODE"
        )
    return modes.pop() if modes else "dual"


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise typer.BadParameter(
            f"--prompt-ids {text!r} is no list of token ids; use for example 1,2,3"
        ) from None


def _denoised_json(answer: Denoised) -> str:
    return msgspec.json.encode(
        {"sequence": answer.sequence, "nfe": answer.nfe, "windows": answer.windows}
    ).decode()


def _denoised_text(answer: Denoised, n_prompt: int) -> str:
    n_computed = sum(map(len, answer.windows))
    return (
        f"output    {','.join(map(str, answer.sequence[n_prompt:]))}\n"
        f"finished  {answer.finish_reason}\n"
        f"forwards  {answer.nfe}, {n_computed} tokens computed"
    )


async def _load(url: str | None, request_id: str) -> tuple[RequestRecord, list[Delta]]:
    async with store_of_stack(url) as store:
        [record] = await store.load([request_id])
        deltas = await store.deltas(request_id)
    if record is None:
        raise InvalidRequestError(
            f"request {request_id} is not in the store; records expire after a while, "
            "replay a younger one"
        )
    return record, deltas


def _model_folder(option: Path | None) -> Path:
    """The option, else that of the stack that runs here, else as every command finds it."""
    stack = running_state(stack_home(os.environ))
    return find_model(option or (Path(stack.model) if stack else None), os.environ)


def _report_json(request_id: str, report: ReplayReport) -> str:
    fields = msgspec.to_builtins(report)
    return msgspec.json.encode(
        {"request_id": request_id, "agrees": report.agrees, **fields}
    ).decode()


def _report_lines(request_id: str, record: RequestRecord, report: ReplayReport) -> list[str]:
    verdict = "identical" if report.is_text_equal else "DIFFERENT"
    n_unmasked = sum(token >= 0 for token in record.canvas)
    lines = [
        f"request {request_id}, {record.state} at step {report.n_steps}, epoch {record.epoch}",
        f"text    {verdict}: {n_unmasked} of {len(record.canvas)} tokens committed",
        f"steps   {report.n_verified} of {report.n_steps} identical",
    ]
    lines += [
        f"        steps {first} to {last} were lost by the store and committed as one: "
        "not verifiable step by step"
        for first, last in report.unverifiable
    ]
    return lines + (_difference_lines(report.difference) if report.difference else [])


def _difference_lines(difference: Difference) -> list[str]:
    recorded, replayed = difference.recorded, difference.replayed
    lines = [f"        step {difference.step} is the first to differ:"]
    for name, step in (("recorded", recorded), ("replayed", replayed)):
        what = (
            f"{step.kind}, {dict(zip(step.positions, step.tokens, strict=True))}"
            if step
            else "nothing, the request had ended"
        )
        lines.append(f"        {name} {what}")
    return [*lines, "        was it served with another model, --dtype or --pack-weights?"]
