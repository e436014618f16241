"""Both ends of the line to the engine, without a process between them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from dilaserve.crashpoints import CrashPoints
from dilaserve.errors import InvalidRequestError
from dilaserve.store.records import MASKED, DecodingSpec
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import (
    BatchOutput,
    Credit,
    EngineLostError,
    EngineRequest,
    NeverFitsError,
)
from dilaserve_gpu_worker.host.loop import EngineLoop, Orders
from dilaserve_gpu_worker.host.orders import (
    Add,
    Allow,
    End,
    Ended,
    Idle,
    Lost,
    Order,
    PassDone,
    Ping,
    Pong,
    Remove,
    Report,
    SetCredit,
)
from dilaserve_gpu_worker.host.port import EnginePort

FAR = 99


def request(name: str, n_prompt: int = 3, n_output: int = 16) -> EngineRequest:
    spec = DecodingSpec(n_output=n_output, block_length=8, seed=1, ignore_eos=True)
    return EngineRequest(name, [5] * n_prompt, spec, 0, [MASKED] * n_output, Credit(0.9, FAR))


def passed(*names: str, n_orders: int) -> PassDone:
    output = {"latency_s": 0.1, "n_tokens": 8, "n_rebuilds": 0, "steps": [step(n) for n in names]}
    return PassDone(
        output=msgspec.convert(output, BatchOutput), n_orders=n_orders, n_free_kv_tokens=0
    )


def step(name: str) -> dict[str, Any]:
    stats = dict.fromkeys(("min", "q25", "median", "mean", "q75"), 0.5)
    counts = {"step": 1, "block": 0, "n_unmasked": 1, "n_block_masked": 7}
    told = {"kind": "cache", "threshold": 0.9, "finish_reason": None, "stats": stats}
    return (
        {"request_id": name, "positions": [0], "tokens": [7], "confidences": [0.9]} | counts | told
    )


@pytest.fixture
def engine(model) -> Engine:
    return Engine(model, cache_mode="dual", n_kv_tokens=256, max_batch_tokens=512)


class Line:
    """A port whose orders are kept."""

    def __init__(self, engine: Engine) -> None:
        self.sent: list[Any] = []
        self.port = EnginePort(engine.limits, self.sent.append)


@pytest.fixture
async def line(engine) -> Line:
    return Line(engine)


async def test_orders_of_one_turn_go_together_and_in_their_order(line):
    line.port.add(request("r"))
    line.port.set_credit("r", Credit(0.5, 1))
    line.port.allow()
    assert line.sent == []
    await asyncio.sleep(0)
    line.port.remove("r")
    await asyncio.sleep(0)
    assert [[type(order) for order in orders] for orders in line.sent] == [
        [Add, SetCredit, Allow],
        [Remove],
    ]
    assert line.sent[0][1] == SetCredit("r", Credit(0.5, 1))


async def test_what_cannot_run_is_refused_without_asking(line):
    with pytest.raises(NeverFitsError, match="the KV pool"):
        line.port.add(request("r", n_output=400))
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        line.port.add(_with_prompt([10**6]))
    await asyncio.sleep(0)
    assert line.sent == []


def _with_prompt(prompt: list[int]) -> EngineRequest:
    spec = DecodingSpec(n_output=8, block_length=8, seed=1)
    return EngineRequest("r", prompt, spec, 0, [MASKED] * 8, Credit(0.9, FAR))


async def test_steps_of_an_earlier_stay_are_dropped(line):
    """A request that was removed and added again while a pass with it was under way."""
    line.port.add(request("old"))  # order 1
    line.port.add(request("stays"))  # order 2
    line.port.remove("old")  # order 3
    line.port.add(request("old"))  # order 4
    line.port.heard(passed("old", "stays", n_orders=2))
    line.port.heard(passed("old", "stays", n_orders=4))
    assert [s.request_id for s in line.port.take().steps] == ["stays"]
    assert [s.request_id for s in line.port.take().steps] == ["old", "stays"]
    assert line.port.take() is None


async def test_a_lost_engine_is_told_of_behind_its_last_pass(line):
    woken = []
    line.port.on_report(lambda: woken.append(1))
    line.port.heard(passed("r", n_orders=1))
    line.port.heard(Lost(reason="rank 1 has ended"))
    assert len(woken) == 2
    assert line.port.has_ended
    assert line.port.take() is not None
    for _ in range(2):
        with pytest.raises(EngineLostError, match="rank 1 has ended"):
            line.port.take()


async def test_an_engine_that_answers_no_ping_is_silent_until_it_says_something(line):
    assert [line.port.ping() for _ in range(6)] == [True] * 4 + [False] * 2
    assert line.sent == [Ping()] * 6
    line.port.heard(Pong())
    assert line.port.ping()


# --- the other end --------------------------------------------------------------------------------


def run(engine: Any, *batches: list[Order] | None, crash: str = "") -> list[Report]:
    """All that a loop says to orders that lie ready."""
    orders: Orders = SimpleQueue()
    for batch in batches:
        orders.put(batch)
    said: list[Report] = []
    EngineLoop(engine, orders, said.append, CrashPoints(crash)).run()
    return said


def passes(said: list[Report]) -> list[PassDone]:
    return [report for report in said if isinstance(report, PassDone)]


def test_no_pass_runs_that_is_not_allowed(engine):
    said = run(engine, [Add(request("r"))], None)
    assert passes(said) == []
    assert said[-1] == Ended()


def test_it_ends_before_passes_that_are_still_allowed(engine):
    assert passes(run(engine, [Add(request("r")), Allow(), Allow(), End()])) == []


class Feeding(SimpleQueue[Any]):
    """Orders that come one batch at a time, each when the last has led as far as it can."""

    def __init__(self, *batches: Any) -> None:
        super().__init__()
        self._batches = list(batches)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block:
            self.put(self._batches.pop(0))
        return super().get(block, timeout)


def test_a_pass_says_which_orders_it_knew_and_what_is_free(engine):
    said: list[Report] = []
    batches = [Add(request("r")), Allow()], [Allow()], [Remove("r")], None
    EngineLoop(engine, Feeding(*batches), said.append, CrashPoints()).run()
    assert [(done.n_orders, done.n_free_kv_tokens) for done in passes(said)] == [
        (2, 256 - 32),
        (3, 256 - 32),
    ]
    assert said[2:] == [Idle(n_free_kv_tokens=256), Ended()]


def test_an_allowed_pass_waits_for_work(engine):
    said: list[Report] = []
    batches = [Allow(), Allow()], [Add(request("r"))], None
    EngineLoop(engine, Feeding(*batches), said.append, CrashPoints()).run()
    assert len(passes(said)) == 2


def test_what_is_said_survives_its_way(engine):
    """Numbers of numpy would not."""
    said = run(engine, [Add(request("r")), Allow(), Allow()], None)
    data = msgspec.msgpack.encode(said)
    assert msgspec.msgpack.decode(data, type=list[Report]) == said


def test_the_process_that_talks_needs_no_torch():
    code = "import sys, dilaserve_gpu_worker.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
