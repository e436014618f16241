"""Several points at a time."""

from __future__ import annotations

from pathlib import Path

from dilaserve_bench.experiments.gsm8k import Gsm8k, Point
from dilaserve_bench.experiments.parallel import measure_all

from .helpers import session


def test_all_are_measured() -> None:
    done = dict(measure_all(abs, [-1, -2, -3, -4, -5], n_jobs=2, is_stopped=lambda: False))
    assert done == {-1: 1, -2: 2, -3: 3, -4: 4, -5: 5}


def test_stopped_it_finishes_what_is_under_way() -> None:
    done: list[int] = []
    keys = [-1, -2, -3, -4, -5]
    for _, value in measure_all(abs, keys, n_jobs=2, is_stopped=lambda: bool(done)):
        done.append(value)
    assert sorted(done) == [1, 2]


def test_results_do_not_depend_on_the_number_of_jobs(tmp_path: Path) -> None:
    wanted = [
        (Point(policy=policy, rate=1.8, overhead=1.6), None) for policy in ("dilaserve", "infaas")
    ]
    with session(tmp_path / "one") as each:
        alone = Gsm8k(each).rows(wanted)
    with session(tmp_path / "two", jobs=2) as each:
        together = Gsm8k(each).rows([*wanted, *wanted])
    assert together == alone * 2
    assert len((tmp_path / "two").read_text().splitlines()) == 4
