"""What an answer says of its own course, and that the stored course says the same."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilaserve.messages import TokenDelta
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import Commit, Delta, ServiceLevel
from dilaserve_gateway.course import Course, course_of, course_report, meets_slo
from dilaserve_gateway.testing import FakeFleet

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "tiny", "prompt": "say hello"}
EVENTFUL = {
    "mean_threshold": 0.75,
    "n_steps": 6,
    "steps": {"recompute": 1, "cache": 5, "rebuild": 2},
    "migrations": 2,
}
"""Of the six steps of `eventful`."""


def eventful(commit: Commit) -> Commit:
    """Steps 3 and 5 run on another worker, which has to rebuild the cache; thresholds from 1.0."""
    return msgspec.structs.replace(
        commit,
        kind="recompute" if commit.step == 1 else "cache",
        worker=f"worker-{(commit.step - 1) // 2 % 2}",
        rebuilt=commit.step in (3, 5),
        threshold=1.1 - commit.step / 10,
    )


def lossy(seed: int) -> Any:
    """Deltas lost, repeated and out of order."""
    dice = random.Random(seed)

    def mangle(deltas: list[TokenDelta]) -> list[TokenDelta]:
        recent = deltas[-3:]
        dice.shuffle(recent)
        return [delta for delta in recent if dice.random() < 0.5]

    return mangle


async def history_of(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    report = (await http.get(f"/v1/requests/{request_id}")).json()["dilaserve"]
    assert isinstance(report, dict)
    return report


def without_latency(report: dict[str, Any]) -> dict[str, Any]:
    assert report["latency_ms"] >= 0
    return {name: value for name, value in report.items() if name != "latency_ms"}


async def data_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("seed", range(8))
async def test_the_answer_and_the_record_tell_the_same(
    http: httpx.AsyncClient, fleet: FakeFleet, seed: int
) -> None:
    fleet.vary, fleet.mangle, fleet.step_s = eventful, lossy(seed), 0.002
    body = COMPLETION | {"slo_ms": 60_000, "priority": 3, "min_confidence": 0.4}
    answer = (await http.post("/v1/completions", json=body)).json()
    report = without_latency(answer["dilaserve"])
    assert report == EVENTFUL | {
        "service_tier": "default",
        "priority": 3,
        "min_confidence": 0.4,
        "slo_ms": 60_000,
        "slo_met": True,
    }
    assert without_latency(await history_of(http, answer["id"])) == report


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_the_last_chunk_of_a_stream_tells_it(
    http: httpx.AsyncClient, fleet: FakeFleet, path: str, include_usage: bool
) -> None:
    fleet.vary = eventful
    body = (COMPLETION if path == "/v1/completions" else CHAT) | {"n": 3}
    chunks = await data_of(http, path, body | {"stream_options": {"include_usage": include_usage}})
    assert [i for i, chunk in enumerate(chunks) if "dilaserve" in chunk] == [len(chunks) - 1]
    last = chunks[-1]
    assert bool(last["choices"]) is not include_usage
    report = last["dilaserve"]
    assert report["n_steps"] == 18
    assert report["steps"] == {"recompute": 3, "cache": 15, "rebuild": 6}
    assert report["migrations"] == 6
    assert report["mean_threshold"] == 0.75


async def test_a_raw_stream_tells_it_at_its_end(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.vary = eventful
    start, *steps, end = await data_of(http, "/v1/denoise", COMPLETION | {"slo_ms": 1})
    assert start["level"]["slo_ms"] == 1
    assert [step["threshold"] for step in steps] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert [step["rebuilt"] for step in steps] == [False, False, True, False, True, False]
    assert {step["worker"] for step in steps} == {"worker-0", "worker-1"}
    assert EVENTFUL.items() <= end["dilaserve"].items()
    assert without_latency(end["dilaserve"]) | {"slo_met": 0} == without_latency(
        await history_of(http, start["id"])
    ) | {"slo_met": 0}


async def test_an_slo_counts_to_the_last_token(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    fleet.step_s = 0.02
    answer = (await http.post("/v1/chat/completions", json=CHAT | {"slo_ms": 60})).json()
    assert answer["dilaserve"]["slo_met"] is False
    assert answer["dilaserve"]["latency_ms"] > 6 * 20
    stored = await history_of(http, answer["id"])
    assert stored["slo_met"] is False
    assert 6 * 20 < stored["latency_ms"] < answer["dilaserve"]["latency_ms"] + 1


async def test_openai_clients_take_it(url: str, fleet: FakeFleet) -> None:
    fleet.vary = eventful
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        messages: Any = CHAT["messages"]
        answer = await create(model="tiny", messages=messages, service_tier="flex")
        assert answer.service_tier == "flex"
        assert answer.model_extra is not None
        assert answer.model_extra["dilaserve"]["slo_ms"] == 120_000
        assert answer.model_extra["dilaserve"]["mean_threshold"] == 0.75
        scaled = await create(model="tiny", messages=messages, service_tier="scale")
        assert scaled.service_tier == "default"
        stream = await create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert (chunks[-1].model_extra or {})["dilaserve"]["migrations"] == 2
        old = await client.completions.create(model="tiny", prompt="a")
        assert (old.model_extra or {})["dilaserve"]["n_steps"] == 6


async def test_of_one_that_goes_on_or_failed(
    http: httpx.AsyncClient, fleet: FakeFleet, memory_store: MemoryStore
) -> None:
    fleet.n_steps = 2
    async with http.stream("POST", "/v1/denoise", json=COMPLETION) as answer:
        request_id = answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if '"step":2' in line:
                break
        going = await history_of(http, request_id)
        assert (going["n_steps"], going["latency_ms"], going["slo_met"]) == (2, None, None)
        await memory_store.fail(request_id, term=1, error="poison")
        failed = await history_of(http, request_id)
        assert (failed["n_steps"], failed["slo_met"]) == (2, False)


async def test_a_stop_string_answers_a_request(http: httpx.AsyncClient, fleet: FakeFleet) -> None:
    """In the store it is cancelled, so that nobody works on what is behind the stop string."""
    fleet.step_s = 0.001
    body = CHAT | {"stop": ["o w"], "slo_ms": 60_000}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    path = f"/v1/requests/{answer['id']}"
    for _ in range(200):
        stored = (await http.get(path)).json()
        if stored["state"] not in ("new", "active"):
            break
        await asyncio.sleep(0.01)
    assert (stored["state"], stored["finish_reason"], stored["error"]) == ("done", "stop", None)
    assert stored["dilaserve"]["slo_met"] is True
    assert stored["dilaserve"]["latency_ms"] >= 0


def test_nothing_has_no_mean() -> None:
    report = course_report(ServiceLevel(), [Course()], latency_s=2.0)
    assert (report["mean_threshold"], report["slo_met"], report["latency_ms"]) == (None, None, 2000)
    assert meets_slo(ServiceLevel(slo_ms=2000), 2.0)
    assert not meets_slo(ServiceLevel(slo_ms=2000), 2.001)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["recompute", "cache"]),
            st.floats(0.1, 1.0),
            st.sampled_from(["a", "b"]),
            st.booleans(),
        )
    )
)
def test_a_course_is_the_sum_of_its_steps(steps: list[tuple[Any, float, str, bool]]) -> None:
    deltas = [
        Delta(
            step=number,
            epoch=1,
            block=0,
            kind=kind,
            threshold=threshold,
            worker=worker,
            latency_ms=1.0,
            positions=[],
            tokens=[],
            confidences=[],
            rebuilt=rebuilt,
        )
        for number, (kind, threshold, worker, rebuilt) in enumerate(steps, start=1)
    ]
    course = course_of(deltas)
    workers = [worker for _, _, worker, _ in steps]
    assert course.n_steps == course.n_counted == len(steps)
    assert course.n_migrations == sum(a != b for a, b in itertools.pairwise(workers))
    assert course.n_rebuilds == sum(rebuilt for *_, rebuilt in steps)
    if steps:
        mean = sum(threshold for _, threshold, *_ in steps) / len(steps)
        assert course.mean_threshold == pytest.approx(mean)
