"""Input and output lengths other than GSM8K's 5-shot prompts (the paper's Figure 13).

The load of each size is such that a batch of its own does the same share of what it can do as
GSM8K's does; its SLO is longer than GSM8K's as its lone request is. The published figure has no
published numbers but the two that the paper's text gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import data_file
from dilaserve_bench.data.ablations import ablations
from dilaserve_bench.experiments.document import Document, Row
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.fitting import overhead_of
from dilaserve_bench.experiments.gsm8k import N_OUTPUT, N_PROMPT, SLO_S, Gsm8k, Point
from dilaserve_bench.experiments.page import Page, Table, interval, number
from dilaserve_bench.twin.recorded import load_steps

__all__ = ["FIGURE_13", "Lengths", "Size", "SizeRow"]

RATE = 1.875
"""On GSM8K; other sizes in proportion to the work of a request."""
POLICIES = ("infaas", "tediserve", "dilaserve")
BUDGET = 8192
"""Tokens of full lengths on one instance."""
BLOCK = 32
THRESHOLD = 0.9
SHOT = 200
"""Tokens of an example in the prompt: an assumption, the paper does not give the lengths."""


@dataclass(frozen=True)
class Size:
    """Prompt and output, in tokens."""

    name: str
    n_prompt: int
    n_output: int


GSM8K = Size("5-shot", N_PROMPT, N_OUTPUT)
SIZES = (
    Size("2-shot", N_PROMPT - 3 * SHOT, N_OUTPUT),
    GSM8K,
    Size("8-shot", N_PROMPT + 3 * SHOT, N_OUTPUT),
    Size("output 64", N_PROMPT, 64),
    Size("output 1024", N_PROMPT, 1024),
)


class SizeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one size: means over seeds."""

    size: str
    n_prompt: int
    n_output: int
    policy: str
    rate: float
    slo_s: float
    attainment: float
    ci95: float | None
    mean_threshold: float | None
    p50_s: float | None
    p99_s: float | None


class Lengths:
    """What a request of some size costs at threshold 0.9, by the profile and the mean steps."""

    def __init__(self) -> None:
        table = load_steps(data_file("gsm8k_llada_steps.json"))
        column = table.thresholds.index(THRESHOLD)
        steps = sum(row[column] for row in table.rows) / len(table.rows)
        self._steps_per_token = steps / table.n_output
        self._curve = load_profiles(data_file("h100_llada.json")).curve(1)

    def lone_s(self, size: Size) -> float:
        """Seconds of a request that is alone on an instance."""
        n_recompute, n_steps = size.n_output / BLOCK, self._steps_per_token * size.n_output
        full_s = self._curve.seconds(size.n_prompt + size.n_output)
        return n_recompute * full_s + (n_steps - n_recompute) * self._curve.seconds(BLOCK)

    def work_s(self, size: Size) -> float:
        """Instance-seconds of a request in as large a batch as the budget allows."""
        n_full = size.n_prompt + size.n_output
        batch = BUDGET // n_full
        share = 1 / (self._steps_per_token * BLOCK)
        n_tokens = batch * (share * n_full + (1 - share) * BLOCK)
        n_steps = self._steps_per_token * size.n_output
        return n_steps * self._curve.seconds(round(n_tokens)) / batch

    def rate(self, size: Size, rate: float) -> float:
        """As much load as GSM8K has at `rate`."""
        return round(rate * self.work_s(GSM8K) / self.work_s(size), 3)

    def slo_s(self, size: Size) -> float:
        """As tight as GSM8K's."""
        return round(SLO_S * self.lone_s(size) / self.lone_s(GSM8K), 2)


def run(session: Session) -> Document[SizeRow]:
    """All sizes with all policies."""
    bench, overhead, lengths = Gsm8k(session), overhead_of(session), Lengths()
    (usual, *_) = session.options.rates or (RATE,)
    policies = session.options.policies or POLICIES
    session.watch.expect(len(SIZES) * len(policies) * len(session.seeds))
    rows = []
    for size in SIZES:
        for policy in policies:
            point = Point(
                policy=policy,
                rate=lengths.rate(size, usual),
                overhead=overhead,
                slo_s=lengths.slo_s(size),
                n_prompt=size.n_prompt,
                n_output=size.n_output,
            )
            row = bench.row(point)
            if row is not None:
                rows.append(_size_row(size, row))
    return session.document(
        "fig13",
        rows,
        n=bench.n_requests,
        published=ablations().lengths,
        found={"overhead": overhead, "rate": usual, "most_points": _most_points(rows)},
    )


def page(document: Document[SizeRow]) -> Page:
    """A line for each size and policy."""
    head = ("size", "prompt", "output", "rate", "SLO s", "policy", "attainment", "threshold",
            "p50 s")  # fmt: skip
    rows = [
        [
            row.size,
            str(row.n_prompt),
            str(row.n_output),
            number(row.rate),
            number(row.slo_s, 2),
            row.policy,
            interval(row.attainment, row.ci95),
            number(row.mean_threshold, 2),
            number(row.p50_s, 2),
        ]
        for row in document.rows
    ]
    published = ablations().lengths
    notes = [
        f"{policy} is up to {points:.1f} points above infaas."
        for policy, points in document.found["most_points"].items()
    ]
    notes.append(
        f"Published: tediserve up to {published.most_points_by_input:.1f} points above infaas by "
        f"input, {published.most_points_by_output:.1f} by output, at loads that are not published."
    )
    return Page([Table(head, rows)], notes)


FIGURE_13 = Experiment(
    name="fig13",
    what="prompts and outputs of other lengths",
    paper="Figure 13",
    row=SizeRow,
    run=run,
    page=page,
    takes=frozenset({"overhead", "policies", "rates"}),
)


def _size_row(size: Size, row: Row) -> SizeRow:
    return SizeRow(
        size=size.name,
        n_prompt=size.n_prompt,
        n_output=size.n_output,
        policy=row.policy,
        rate=row.rate,
        slo_s=row.slo_s,
        attainment=row.attainment,
        ci95=row.ci95,
        mean_threshold=row.mean_threshold,
        p50_s=row.p50_s,
        p99_s=row.p99_s,
    )


def _most_points(rows: list[SizeRow]) -> dict[str, float]:
    """By policy, the largest distance to infaas at the same size."""
    infaas = {row.size: row.attainment for row in rows if row.policy == "infaas"}
    most: dict[str, float] = {}
    for row in rows:
        if row.policy != "infaas" and row.size in infaas:
            points = 100 * (row.attainment - infaas[row.size])
            most[row.policy] = round(max(most.get(row.policy, points), points), 2)
    return most
