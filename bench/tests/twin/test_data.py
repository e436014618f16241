"""What is typed into the repository is what was published."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dilaserve.profiles import load_profiles
from dilaserve_bench.data import average_day, data_file, gsm8k_curves, sharegpt_classes
from dilaserve_bench.twin.recorded import load_steps

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "published"


def published(name: str) -> Any:
    if not PUBLISHED.is_dir():
        pytest.skip(f"{PUBLISHED} is not here")
    return json.loads((PUBLISHED / name).read_text())


def test_latencies_are_the_published_ones() -> None:
    profiles = load_profiles(data_file("h100_llada.json"))
    source = {
        each["tp"]: each["lat"]
        for each in published("latency_profiles.json")["profiles"]
        if (each["model"], each["hw"]) == ("LLaDA-8B-Instruct", "H100")
    }
    typed = {
        each.tp_degree: {str(point.n_tokens): point.seconds for point in each.points}
        for each in profiles.profiles
    }
    assert typed == source


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_latencies_are_looked_up_smooth(degree: int) -> None:
    curve = load_profiles(data_file("h100_llada.json")).curve(degree)
    assert curve.n_measured == 8192
    assert all(a <= b for a, b in pairwise(curve.table))


def test_step_counts_are_the_published_ones() -> None:
    table, source = (
        load_steps(data_file("gsm8k_llada_steps.json")),
        published("oracle_step_counts.json"),
    )
    assert (table.thresholds, table.rows) == (source["thresholds"], source["rows"])
    assert len(table.rows) == 130


def test_the_day_is_the_published_one() -> None:
    source = published("realtrace_timeline.json")["avg_day_hourly_rps_scaled_peak20"]
    assert average_day().rates == source["from_20qps_trace"]


def test_the_classes_are_the_published_ones() -> None:
    source = published("workload_class_mix.json")["rps"]
    assert {f"{p}_{o}": rate for p, o, rate in sharegpt_classes().classes} == source


def test_the_curves_are_the_published_ones() -> None:
    source = published("gsm8k_slo_curves.json")["LLaDA"]["GSM8K"]
    curves = gsm8k_curves()
    assert (curves.rates, curves.slo_multiples) == (source["rps_per_gpu"], source["slo_multiple"])
    for name in ("TeDiServe", "Llumnix", "INFaaS"):
        curve = curves.systems[name.lower()]
        assert curve.attainment_by_rate == source["slo_att_rps"][name]
        assert curve.accuracy_by_rate == source["acc_rps"][name]
        assert curve.attainment_by_slo == source["slo_att_slo"][name]
