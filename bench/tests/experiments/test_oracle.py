"""The search for the best mix: who goes on, who is tried to the end, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from dilaserve_bench.experiments import oracle
from dilaserve_bench.experiments.oracle import Key, Load, Outcome, Round, search
from dilaserve_bench.twin.report import RunReport

from .helpers import session

LOAD = Load(rate=2.0, window_s=100.0, slo_s=12.5, overhead=1.6)
LATENCIES = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}


def outcome(mix: str, attainment: float, mean_s: float) -> Outcome:
    return Outcome(mix=mix, attainment=attainment, mean_s=mean_s, mean_threshold=0.9)


def report(key: Key) -> RunReport:
    """By name; the fastest of all misses everything as soon as it is looked at for long."""
    fails = key.mix == "d" and key.window_s == LOAD.window_s
    values: dict[str, object] = {
        field.name: 0.0 if field.type in (float, "float") else 0
        for field in msgspec.structs.fields(RunReport)
        if field.required
    }
    values |= {"attainment": 0.0 if fails else 1.0, "mean_s": LATENCIES[key.mix]}
    values |= {"is_complete": True, "percentiles_s": [], "slots": [], "moves": {}}
    return msgspec.convert(values, RunReport, strict=False)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    asked: list[tuple[str, float]] = []

    def watched(key: Key, _: object) -> RunReport:
        asked.append((key.mix, key.window_s))
        return report(key)

    monkeypatch.setattr(oracle, "_watched", watched)
    return asked


def found(path: Path, always: Sequence[str], *rounds: Round) -> list[Outcome] | None:
    with session(path, n_seeds=1) as asked:
        return search(asked, LOAD, list(LATENCIES), always, rounds)


def test_best_is_the_fastest_among_those_that_attain_the_most() -> None:
    outcomes = [outcome("fast", 0.9, 1.0), outcome("sure", 0.999, 2.0), outcome("slow", 1.0, 3.0)]
    assert [each.mix for each in oracle.ranked(outcomes)] == ["sure", "slow", "fast"]
    assert oracle.best_of(outcomes).mix == "sure"


def test_fewer_go_on_for_longer(tmp_path: Path, tried: list[tuple[str, float]]) -> None:
    best = found(tmp_path / "points", ["a"], Round(10.0, 1, 3), Round(30.0, 1, 2))
    assert tried[:4] == [(mix, 10.0) for mix in "abcd"]
    assert tried[4:7] == [(mix, 30.0) for mix in "dcb"]
    assert tried[7:] == [("d", 100.0), ("c", 100.0), ("a", 100.0)]
    assert best is not None
    assert [each.mix for each in best] == ["c", "a", "d"]


def test_a_trial_lasts_until_enough_have_arrived(
    tmp_path: Path, tried: list[tuple[str, float]]
) -> None:
    found(tmp_path / "points", [], Round(10.0, 50, 2), Round(10.0, 5000, 1))
    assert {seconds for _, seconds in tried} == {25.0, 100.0}
    assert len(tried) == 4 + 2, "what was tried on all of it is not tried again"


def test_all_mixes_use_all_gpus() -> None:
    counts = list(oracle.mixes((4, 4, 4, 4)))
    assert len(counts) == 25
    assert all(sum(d * n for d, n in each.items()) == 16 for each in counts)
    assert oracle.mix_name({1: 8, 2: 0, 4: 2}.items()) == "8xtp1,2xtp4"
