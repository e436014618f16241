"""A measurement of a GPU as text and as a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dilaserve_bench.gpu.measure import GpuReport

__all__ = ["lines", "save"]


def lines(report: GpuReport) -> Iterator[str]:
    """For a terminal."""
    nominal = report.nominal_peak_tflops
    said = f"{nominal:.0f} by its data sheet" if nominal else "its data sheet is not known here"
    yield (
        f"{report.device}, torch {report.torch_version}, {report.dtype}, {report.attention}: "
        f"{report.n_parameters / 1e9:.2f} x 10^9 parameters, KV pool of {report.n_kv_tokens} tokens"
    )
    yield f"peak {report.measured_peak_tflops:.0f} TFLOP/s measured, {said}"
    yield "kind       rows  length  tokens  graphs       ms  TFLOP/s  of measured  of nominal"
    for row in report.table:
        of_nominal = "" if row.of_nominal_peak is None else f"{row.of_nominal_peak:10.3f}"
        yield (
            f"{row.kind:9}  {row.n_rows:4}  {row.length:6}  {row.n_tokens:6}  "
            f"{'on' if row.graphs else 'off':6}  {row.ms:7.2f}  {row.tflops:7.1f}  "
            f"{row.of_measured_peak:11.3f}  {of_nominal}"
        )
    for each in report.batching:
        yield (
            f"{each.n_requests} requests, graphs {'on' if each.graphs else 'off'}: one by one "
            f"{each.one_by_one_s:.2f} s, together {each.together_s:.2f} s, {each.gain:.2f} x; "
            f"{each.tokens_per_s:.0f} tokens/s; {each.n_replays} passes replayed"
        )
    yield f"measured in {report.seconds:.0f} s"


def save(report: GpuReport, folder: Path, name: str) -> Path:
    """As JSON; the folder is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return path
