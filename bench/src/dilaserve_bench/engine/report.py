"""What `dilaserve bench engine` found, for programs and for people."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dilaserve_bench.engine.batching import Batching
from dilaserve_bench.engine.policies import PolicyRow
from dilaserve_bench.engine.shares import EngineRow, Left

__all__ = ["EngineReport", "json_of", "lines_of"]


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """And how it was measured."""

    model: str
    device: str
    threads: int
    products: str
    """Of the engine: packed or plain."""
    clock: str
    huge_pages: bool
    """Whether the process asked for them, as a worker's engine does."""
    plan_tokens: int
    rows: list[EngineRow]
    batching: Batching | None
    plan_policies: list[PolicyRow]
    left: dict[str, list[Left]]
    """By mode and concurrency: what is outside matrix products and attention."""


def json_of(report: EngineReport) -> str:
    """Indented."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def lines_of(report: EngineReport) -> Iterator[str]:
    """Tables and sentences."""
    yield (
        "mode    at a time  tokens/s  step ms  outside forward  outside kernels  of bare  of torch"
    )
    yield from map(_line, report.rows)
    yield (
        f"of bare: by its products and attention alone, as the engine computes them, here with "
        f"{report.products} matrices; of torch: with products as torch computes them"
    )
    if not report.huge_pages:
        yield "without huge pages; as in a worker: GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    for name, parts in report.left.items():
        shares = [f"{part.operator} {100 * part.share:.1f} %" for part in parts[:6]]
        yield f"outside kernels, {name}: {', '.join(shares)}"
    if report.batching is not None:
        yield _batching_line(report.batching)
    yield from _policy_lines(report.plan_policies)


def _line(row: EngineRow) -> str:
    return (
        f"{row.mode:6}  {row.concurrency:9}  {row.tokens_per_s:8.0f}  {row.step_ms:7.2f}  "
        f"{row.outside_forward:15.3f}  {row.outside_kernels:15.3f}  {row.of_bare:7.3f}  "
        f"{row.of_torch:8.3f}"
    )


def _batching_line(batching: Batching) -> str:
    return (
        f"{batching.concurrency} at a time, mixed lengths: continuous "
        f"{batching.continuous:.0f} tokens/s, {batching.over_static:.2f} x static, "
        f"{batching.over_leaving:.2f} x static where ended requests leave the batch, "
        f"{batching.over_padded:.2f} x static and padded; {batching.fewer_passes:.2f} x fewer "
        "passes than static"
    )


def _policy_lines(rows: list[PolicyRow]) -> Iterator[str]:
    if rows:
        yield (
            "plan policy  tokens/s  passes  pass ms: mean, p99  gap ms: mean, p99  "
            "request ms: mean, p99"
        )
    for row in rows:
        yield (
            f"{row.plan_policy:11}  {row.tokens_per_s:8.0f}  {row.n_passes:6}  "
            f"{row.pass_ms:9.2f}  {row.pass_p99_ms:8.2f}  {row.gap_ms:8.2f}  "
            f"{row.gap_p99_ms:8.2f}  {row.request_ms:11.1f}  {row.request_p99_ms:9.1f}"
        )
