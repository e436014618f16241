"""Served traffic becomes recorded runs, in bounded space."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from dilaserve.messages import StepItemResult
from dilaserve.recording import RecordedStep, is_complete, read_runs
from dilaserve.store import Store
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import DecodingSpec
from dilaserve.testing import new_request
from dilaserve_predictor.recording import BoundedFolder, Collector, TrafficRecorder

from .made_up import item_of, run_of

RUN = run_of(1, lambda _: 0.9, run_id="r")
ITEMS = [item_of(step) for step in RUN]


def collected(items: list[StepItemResult]) -> list[int] | None:
    collector = Collector()
    found = None
    for item in items:
        run = collector.stepped(item, 5.0)
        found = [step.step for step, _ in run] if run is not None else found
    return found


def test_a_run_is_complete_with_its_last_step() -> None:
    assert collected(ITEMS[:-1]) is None
    assert collected(ITEMS) == list(range(1, len(ITEMS) + 1))


def test_repeated_and_fenced_results_are_left_out() -> None:
    fenced = msgspec.structs.replace(ITEMS[2], outcome="fenced")
    noisy = [ITEMS[0], ITEMS[0], ITEMS[1], fenced, *ITEMS[2:]]
    assert collected(noisy) == list(range(1, len(ITEMS) + 1))


@pytest.mark.parametrize("lost", [0, 1, len(ITEMS) - 2])
def test_a_run_with_a_lost_result_is_none(lost: int) -> None:
    assert collected([item for n, item in enumerate(ITEMS) if n != lost]) is None


def test_whoever_is_silent_for_longest_is_forgotten() -> None:
    collector = Collector(most_requests=1)
    collector.stepped(ITEMS[0], 5.0)
    collector.stepped(msgspec.structs.replace(ITEMS[0], request_id="other"), 5.0)
    assert all(collector.stepped(item, 5.0) is None for item in ITEMS[1:])


def names() -> itertools.count[int]:
    return itertools.count(1)


def folder(path: Path, max_bytes: int = 10**6) -> BoundedFolder:
    numbers = names()
    return BoundedFolder(path, max_bytes, name=lambda: f"{next(numbers):04d}")


async def test_a_served_request_is_recorded_as_a_run_is(store: Store, tmp_path: Path) -> None:
    spec = DecodingSpec(n_output=64, block_length=32, seed=1)
    await store.new(new_request(request_id="r", model_id="made-up", spec=spec, prompt=[7, 8]))
    recorder = TrafficRecorder(store, folder(tmp_path))
    steps = await recorder.describe([(item, 5.0) for item in ITEMS])
    assert steps is not None
    recorder.write(steps)
    recorder.close()
    (run,) = read_runs([tmp_path / "0001.jsonl"])
    assert is_complete(run)
    prompt_id = run[0].prompt_id
    assert run == [msgspec.structs.replace(step, prompt_id=prompt_id) for step in RUN]


async def test_the_same_prompt_has_the_same_id() -> None:
    store = MemoryStore()
    for name, prompt in (("r", [1, 2]), ("s", [1, 2]), ("t", [1, 3])):
        await store.new(new_request(request_id=name, prompt=prompt))
    recorder = TrafficRecorder(store, folder(Path("unused")))
    ids = []
    for name in "rst":
        item = msgspec.structs.replace(ITEMS[0], request_id=name)
        steps = await recorder.describe([(item, 5.0)])
        assert steps is not None
        ids.append(steps[0].prompt_id)
    assert ids[0] == ids[1] != ids[2]


async def test_what_the_store_has_forgotten_is_not_recorded() -> None:
    recorder = TrafficRecorder(MemoryStore(), folder(Path("unused")))
    assert await recorder.describe([(ITEMS[0], 5.0)]) is None


def test_the_oldest_files_go_when_the_space_is_full(tmp_path: Path) -> None:
    max_bytes = 8 * 4000
    bounded = folder(tmp_path, max_bytes)
    for number in range(200):
        bounded.write([msgspec.structs.replace(step, run_id=str(number)) for step in RUN[:2]])
    bounded.close()
    files = sorted(tmp_path.glob("*.jsonl"))
    assert sum(file.stat().st_size for file in files) <= max_bytes + 2000
    assert len(files) > 4
    kept = [run[0].run_id for run in read_runs(files)]
    assert kept == [str(number) for number in range(200 - len(kept), 200)]


def test_space_is_kept_over_restarts(tmp_path: Path) -> None:
    for start in range(5):
        numbers = itertools.count(100 * start)
        bounded = BoundedFolder(tmp_path, 8 * 4000, name=lambda n=numbers: f"{next(n):04d}")
        for number in range(100):
            bounded.write([rename(step, number) for step in RUN[:2]])
        bounded.close()
    assert sum(file.stat().st_size for file in tmp_path.glob("*.jsonl")) <= 8 * 4000 + 2000


def rename(step: RecordedStep, number: int) -> RecordedStep:
    return msgspec.structs.replace(step, run_id=str(number))
