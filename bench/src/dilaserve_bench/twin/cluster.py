"""The virtual instances: how many of which degree, how they come and go, who gets commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.messages import CacheMode, InstanceInfo, WorkerEvent
from dilaserve_bench.twin.engine import VirtualEngine
from dilaserve_bench.twin.prices import Lookup, PassSeconds
from dilaserve_bench.twin.source import StepSource
from dilaserve_bench.twin.store import TwinStore
from dilaserve_bench.twin.timeline import Timeline
from dilaserve_bench.twin.worker import PassObserver, VirtualWorker
from dilaserve_gpu_worker.engine.plan_policy import PLAN_TOKENS, PlanPolicyName, build_plan_policy
from dilaserve_scheduler.core.effects import Send

__all__ = [
    "MODEL_ID",
    "Cluster",
    "ClusterSpec",
    "Group",
    "parse_mix",
]

MODEL_ID = "virtual"
MOST_INSTANCES = 65_536


class Group(msgspec.Struct, frozen=True):
    """Instances of one TP degree."""

    tp_degree: int
    n_instances: int


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. Seconds and tokens."""

    groups: tuple[Group, ...]
    overhead: float = 1.0
    """Factor on every pass: what a system loses outside of the profiled pass."""
    lookup: Lookup = "smoothed"
    lock_step: bool = False
    """Whether a pass waits until everybody on the instance may run (the published system sends
    each pass to its instance anew); needs `run_ahead` 1."""
    max_batch_tokens: int = 8192
    """Of one pass, and of full lengths on one instance."""
    n_kv_tokens: int = 16384
    """KV pool of one instance; the default never binds before `max_batch_tokens` does."""
    max_sequence_length: int = 4096
    cache_mode: CacheMode = "dual"
    plan_policy: PlanPolicyName = "blockserve"
    """How the engine of an instance chooses the rows of a pass."""
    plan_tokens: int = PLAN_TOKENS
    """Of a pass on average, under the plan policy sangam."""
    block_length: int = 32
    bus_s: float = 0.0003
    """Latency of a message."""
    store_s: float = 0.0002
    """Round trip to the store."""
    heartbeat_s: float = 0.25

    @property
    def n_instances(self) -> int:
        """Of all degrees."""
        return sum(group.n_instances for group in self.groups)

    @property
    def degrees(self) -> list[int]:
        """TP degrees of all instances, by number."""
        return [group.tp_degree for group in self.groups for _ in range(group.n_instances)]

    @property
    def n_gpus(self) -> int:
        """Of all instances."""
        return sum(group.n_instances * group.tp_degree for group in self.groups)


def parse_mix(text: str) -> tuple[Group, ...]:
    """ "16xtp1" or "8xtp1,2xtp4". Raises DiLaServeError."""
    groups = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)xtp(\d+)", part.strip())
        if match is None or not 1 <= int(match[1]) <= MOST_INSTANCES or int(match[2]) < 1:
            raise DiLaServeError(
                f"instances {part!r} are no mix of up to {MOST_INSTANCES} of a degree; write for "
                "example 8xtp1,2xtp4"
            )
        groups.append(Group(tp_degree=int(match[2]), n_instances=int(match[1])))
    return tuple(groups)


class Cluster:
    """All instances, numbered from 0 in the order of the mix."""

    def __init__(
        self,
        spec: ClusterSpec,
        source: StepSource,
        *,
        pass_seconds: PassSeconds,
        timeline: Timeline,
        store: TwinStore,
        send: Callable[[WorkerEvent, float], None],
        observer: PassObserver,
    ) -> None:
        self._spec = spec
        self._source = source
        self._timeline = timeline
        self._store = store
        self._send = send
        self._observer = observer
        self._degrees = spec.degrees
        self._pass_s = cache(pass_seconds)
        for degree in set(self._degrees):
            self._pass_s(degree)
        self._workers: list[VirtualWorker | None] = [None] * len(self._degrees)
        self._ended: set[int] = set()
        self._by_id: dict[str, VirtualWorker] = {}
        self._n_started = self._n_returning = 0
        self._up_s = self._busy_s = 0.0

    def start_all(self) -> None:
        """Start every instance; their heartbeats are spread over the interval."""
        for number in range(len(self._workers)):
            self.start(number)

    def start(self, number: int) -> None:
        """Start a new incarnation of an instance, unless it is there."""
        if self._workers[number] is not None:
            return
        self._n_started += 1
        worker = self._build(number)
        self._workers[number] = self._by_id[worker.info.instance_id] = worker
        worker.start(self._spec.heartbeat_s * (number + 1) / len(self._workers))

    def kill(self, number: int, down_s: float | None) -> None:
        """An instance dies; it is started again after `down_s`, if at all."""
        worker = self._take(number)
        if worker is not None:
            worker.kill()
            self._start_again(number, down_s)

    def leave(self, number: int, down_s: float | None) -> None:
        """An instance leaves on purpose."""
        worker = self._take(number)
        if worker is not None:
            worker.leave()
            self._start_again(number, down_s)

    def launch(self, tp_degree: int, after_s: float, then: Callable[[], None]) -> int:
        """One more instance, which serves `after_s` from now; `then` is called when it does."""
        number = len(self._workers)
        self._degrees.append(tp_degree)
        self._workers.append(None)
        self._n_returning += 1
        self._timeline.after(after_s, self._launched, (number, then))
        return number

    def end(self, number: int, then: Callable[[], None]) -> None:
        """An instance leaves for good, whatever it does now; `then` is called when it is gone."""
        self._ended.add(number)
        worker = self._take(number)
        if worker is not None:
            worker.leave(then)
        else:
            self._timeline.after(0.0, lambda _: then())

    def id_of(self, number: int) -> str | None:
        """The instance id of an instance that is there."""
        worker = self._workers[number]
        return None if worker is None else worker.info.instance_id

    def command(self, sent: Send) -> None:
        """A command arrives."""
        worker = self._by_id.get(sent.instance_id)
        if worker is not None:
            worker.receive(sent.command)

    def is_gone(self) -> bool:
        """Whether no instance is there, and none comes back."""
        return not self._by_id and not self._n_returning

    def utilisation(self) -> float:
        """Share of the time of all instances, as long as they were there, spent in passes."""
        now = self._timeline.now
        there = [worker for worker in self._workers if worker is not None]
        up_s = self._up_s + sum(now - worker.started_at for worker in there)
        return (self._busy_s + sum(worker.busy_s for worker in there)) / up_s if up_s else 0.0

    def _take(self, number: int) -> VirtualWorker | None:
        worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            del self._by_id[worker.info.instance_id]
            self._up_s += self._timeline.now - worker.started_at
            self._busy_s += worker.busy_s
        return worker

    def _start_again(self, number: int, down_s: float | None) -> None:
        if down_s is not None:
            self._n_returning += 1
            self._timeline.after(down_s, self._return, number)

    def _return(self, number: int) -> None:
        self._n_returning -= 1
        if number not in self._ended:
            self.start(number)

    def _launched(self, launched: tuple[int, Callable[[], None]]) -> None:
        number, then = launched
        self._return(number)
        if number not in self._ended:
            then()

    def _build(self, number: int) -> VirtualWorker:
        spec, degree = self._spec, self._degrees[number]
        info = InstanceInfo(
            instance_id=f"i{number}-{self._n_started:04x}",
            name=f"i{number}",
            model_id=MODEL_ID,
            weights_hash="virtual",
            tp_degree=degree,
            cache_mode=spec.cache_mode,
            block_length=spec.block_length,
            max_batch_tokens=spec.max_batch_tokens,
            n_kv_tokens=0 if spec.cache_mode == "none" else spec.n_kv_tokens,
            max_sequence_length=spec.max_sequence_length,
            host="virtual",
            pid=number,
            device="virtual",
        )
        engine = VirtualEngine(
            self._source,
            cache_mode=spec.cache_mode,
            n_kv_tokens=spec.n_kv_tokens,
            max_batch_tokens=spec.max_batch_tokens,
            max_sequence_length=spec.max_sequence_length,
            plan_policy=build_plan_policy(spec.plan_policy, n_tokens=spec.plan_tokens),
        )
        return VirtualWorker(
            info,
            engine,
            timeline=self._timeline,
            store=self._store,
            send=self._send,
            observer=self._observer,
            pass_s=self._pass_s(degree),
            store_s=spec.store_s,
            heartbeat_s=spec.heartbeat_s,
            lock_step=spec.lock_step,
        )
