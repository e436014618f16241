"""Arrivals: paired between policies, as fast as asked, read from files."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from pathlib import Path

import pytest

from dilaserve.errors import DiLaServeError
from dilaserve_bench.data import average_day, sharegpt_classes
from dilaserve_bench.twin.traces import (
    TraceEntry,
    TraceError,
    is_rates,
    read_rates,
    read_trace,
)
from dilaserve_bench.twin.workload import RequestClass, daily, deal, lasting, poisson, replayed

ONE = RequestClass(n_prompt=100, n_output=64, slo_s=9.5, priority=1, min_confidence=0.6)
SMALL = RequestClass(n_prompt=10, n_output=32, weight=3.0)
LARGE = RequestClass(n_prompt=1000, n_output=256, weight=1.0)


def test_a_seed_is_a_workload() -> None:
    draw = poisson([SMALL, LARGE], rate=5.0, n=50, n_cases=7)
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_sizes_leave_times_and_cases_as_they_are() -> None:
    one = poisson([ONE], rate=5.0, n=50, n_cases=7)(3)
    two = poisson([SMALL, LARGE], rate=5.0, n=50, n_cases=7)(3)
    assert [a.at_s for a in one] == [a.at_s for a in two]
    assert [a.case for a in one] == [a.case for a in two]


def test_a_faster_rate_is_the_same_course_of_things() -> None:
    slow = poisson([ONE], rate=2.0, n=50, n_cases=7)(3)
    fast = poisson([ONE], rate=4.0, n=50, n_cases=7)(3)
    assert [a.at_s for a in slow] == pytest.approx([2 * a.at_s for a in fast])


def test_everything_of_a_class_arrives() -> None:
    (arrival,) = poisson([ONE], rate=1.0, n=1, n_cases=1)(0)
    assert (arrival.n_prompt, arrival.n_output) == (100, 64)
    assert (arrival.slo_s, arrival.priority, arrival.min_confidence) == (9.5, 1, 0.6)


def test_rate_and_shares_are_as_asked() -> None:
    drawn = poisson([SMALL, LARGE], rate=10.0, n=4000, n_cases=7)(0)
    assert drawn[-1].at_s == pytest.approx(400.0, rel=0.05)
    assert sum(a.n_prompt == 10 for a in drawn) == pytest.approx(3000, rel=0.05)


def test_every_case_comes_before_any_comes_again() -> None:
    cases = list(islice(deal(random.Random(1), 5), 15))
    for start in (0, 5, 10):
        assert sorted(cases[start : start + 5]) == [0, 1, 2, 3, 4]
    assert cases[:5] != cases[5:10]


def test_rates_change_by_the_slot() -> None:
    drawn = daily([ONE], rates=[20.0, 0.0, 5.0], slot_s=100.0, n_cases=7)(0)
    times = [a.at_s for a in drawn]
    assert all(a <= b for a, b in pairwise(times))
    counts = [sum(100 * k <= t < 100 * (k + 1) for t in times) for k in range(3)]
    assert counts[0] == pytest.approx(2000, rel=0.1)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(500, rel=0.15)


def test_the_average_day_is_the_papers_trace() -> None:
    day = average_day()
    assert len(day.rates) == 24
    assert sum(day.rates) * day.slot_s == pytest.approx(63_736, abs=1)
    drawn = daily([ONE], rates=day.rates, slot_s=day.slot_s, n_cases=7)(0)
    assert len(drawn) == pytest.approx(63_736, abs=4 * 63_736**0.5)
    assert drawn[-1].at_s < 7200


def test_the_class_mix_is_the_published_one() -> None:
    classes = sharegpt_classes().classes
    assert len(classes) == 32
    assert sum(weight for _, _, weight in classes) == pytest.approx(21.213, abs=0.001)


def test_azure_file(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:51.0000000,4000,200\n"
    )
    first, second = read_trace(path, block_length=32, max_sequence_length=4096)
    assert (first.n_prompt, first.n_output) == (374, 64)
    assert (second.n_prompt, second.n_output) == (396, 128)
    assert second.at_s - first.at_s == pytest.approx(4.314579, abs=1e-6)


def test_burstgpt_file(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n"
        "47,GPT-4,10,33,43,API log\n"
    )
    entries = read_trace(path, block_length=32, max_sequence_length=4096)
    assert entries == [TraceEntry(5.0, 472, 32), TraceEntry(47.0, 10, 64)]
    drawn = replayed(entries, ONE, n_cases=3, speed=2.0)(0)
    assert [a.at_s for a in drawn] == [0.0, 21.0]
    assert [(a.n_prompt, a.n_output, a.slo_s) for a in drawn] == [(472, 32, 9.5), (10, 64, 9.5)]


def test_servegen_rates(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text("model,t_s,rps\nm-large,0,2.5\nm-large,600,3.5\nm-small,0,9\n")
    assert is_rates(path)
    series = read_rates(path)
    assert (series.slot_s, series.rates) == (600.0, (2.5, 3.5))
    with pytest.raises(TraceError, match="m-small"):
        read_rates(path, model="m-small")


@pytest.mark.parametrize(
    "rows",
    [
        "",
        "m,0,1\n",
        "m,0,1\nm,0,1\n",
        "m,0,0\nm,9,0\n",
        "m,0,-1\n",
        "m,0,1\nm,60,1\nm,600,1\n",
        "m,60,1\nm,0,1\n",
    ],
)
def test_useless_rates_are_named(tmp_path: Path, rows: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(f"model,t_s,rps\n{rows}")
    with pytest.raises(TraceError, match=r"rates\.csv"):
        read_rates(path)


def test_only_the_requests_asked_for_are_drawn() -> None:
    """However many would come."""
    drawn = daily([ONE], rates=[1e9, 1e9], slot_s=60.0, n_cases=7, n=3)(0)
    assert len(drawn) == 3
    with pytest.raises(DiLaServeError, match=r"1\.2e\+11 requests .* --requests"):
        daily([ONE], rates=[1e9, 1e9], slot_s=60.0, n_cases=7)


def test_a_workload_that_goes_on_for_too_long_is_refused() -> None:
    day = daily([ONE], rates=[1.0], slot_s=60.0, n_cases=7)
    assert lasting(day, 60.0)(0) == day(0)
    with pytest.raises(DiLaServeError, match="--horizon"):
        lasting(day, 30.0)(0)


def test_a_spreadsheets_mark_and_a_time_zone_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + AZURE + b"2024-05-10 00:00:00,1,2\n2024-05-10 02:00:09+02:00,1,2\n"
    )
    first, second = read_trace(path, block_length=32, max_sequence_length=4096)
    assert second.at_s - first.at_s == 9.0


AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = b"Timestamp,Request tokens,Response tokens\n"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"a,b\n1,2\n",
        b"\xaf\xfe\x00",
        AZURE,
        AZURE + b"yesterday,1,2\n",
        AZURE + b"2024-05-10 00:00:00,1,2\n2024-05-10 00:00:01\n",
        BURST + b"nan,1,2\n",
        BURST + b"0,1e3,2\n",
    ],
)
def test_useless_file_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "odd.csv"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=r"odd\.csv"):
        read_trace(path, block_length=32, max_sequence_length=4096)
    with pytest.raises(TraceError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv", block_length=32, max_sequence_length=4096)
