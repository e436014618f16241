"""A virtual cluster on a virtual clock: the real core, the real memory store, workers that follow
the protocol, and a network that loses, repeats and reorders. Time passes only in `run_until`."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dilaserve.errors import StoreUnavailableError
from dilaserve.messages import (
    Admitted,
    Cancel,
    ConfidenceStats,
    Heartbeat,
    Held,
    InstanceDown,
    InstanceInfo,
    InstanceUp,
    Message,
    Refused,
    Rejected,
    StepCommand,
    StepItem,
    StepItemResult,
    StepResult,
    Submit,
)
from dilaserve.plan_messages import Drain
from dilaserve.store.memory import MemoryStore
from dilaserve.store.records import (
    MASKED,
    Commit,
    DecodingSpec,
    NewRequest,
    RequestRecord,
    ServiceLevel,
)
from dilaserve_scheduler.core import Core, CoreSettings
from dilaserve_scheduler.core.effects import (
    Admit,
    Effect,
    Fail,
    ListActive,
    Load,
    RaiseTerm,
    Reassign,
    Reply,
    Send,
)
from dilaserve_scheduler.core.events import (
    ActiveListed,
    AdmitAnswered,
    Event,
    FailAnswered,
    Loaded,
    ReassignAnswered,
    Recovered,
    StoreRestarted,
    TermRaised,
)
from dilaserve_scheduler.policies import PolicyOptions, build_policy
from dilaserve_scheduler.records import to_stored

T = TypeVar("T")
BLOCK = 8
MODEL = "m"
STATS = ConfidenceStats(min=0.1, q25=0.3, median=0.5, mean=0.5, q75=0.8)


def call(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("the memory store waited for something")


class World:
    """Everything but the requests, which the test submits."""

    def __init__(
        self,
        *,
        seed: int = 0,
        loss: float = 0.0,
        n_workers: int = 2,
        settings: CoreSettings | None = None,
        budget: int = 256,
        policy: str = "infaas",
        weights: Mapping[str, str] | None = None,
    ) -> None:
        """`weights`: hashes by a worker's name, where they are not all the same."""
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 100.0
        self.store = MemoryStore(clock=lambda: self.now, retention_s=1e9)
        self.core: Core | None = None
        self.replies: dict[str, Admitted | Refused] = {}
        self.partitioned = False
        self.n_sent = 0
        self._settings = settings or CoreSettings()
        self._budget = budget
        self._policy = policy
        self._weights = weights or {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._incarnations = itertools.count(0x1000)
        self._generation = 0
        self._wake_at: float | None = None
        self._snapshots: list[tuple[float, Any]] = []
        self.workers: dict[str, Worker] = {}
        self.start_scheduler()
        for number in range(n_workers):
            self.start_worker(f"w{number}")
        self._keep_snapshots()

    # --- time ----------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), action))

    def run_until(self, time: float) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= time:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = time

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.run_until(self.now + seconds)

    # --- gateway -------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        *,
        n_prompt: int = 8,
        n_output: int = 24,
        level: ServiceLevel | None = None,
    ) -> None:
        """Write a record, and submit it again and again until it is admitted."""
        request = NewRequest(
            request_id=request_id,
            model_id=MODEL,
            prompt=[1] * n_prompt,
            spec=DecodingSpec(n_output=n_output, block_length=BLOCK, seed=1),
            level=level or ServiceLevel(),
            gateway_id="g",
            arrival_s=self.now,
        )
        self._write(request)
        self._ask(request)

    def cancel(self, request_id: str) -> None:
        """As a gateway does: mark the record, tell the scheduler."""
        self._store_call(
            lambda: call(self.store.cancel(request_id, reason="left")),
            lambda answer: None,
            scheduler=False,
        )
        self.to_core(Cancel(request_id=request_id))

    def record(self, request_id: str) -> RequestRecord | None:
        """What is stored."""
        (record,) = call(self.store.load([request_id]))
        return record

    def _write(self, request: NewRequest) -> None:
        write = lambda: call(self.store.new(request, expire_s=1e9))  # noqa: E731
        self._store_call(write, lambda answer: None, scheduler=False)

    def _ask(self, request: NewRequest) -> None:
        reply = self.replies.get(request.request_id)
        if isinstance(reply, Admitted) or (reply is not None and reply.code == "finished"):
            return
        self.to_core(
            Submit(
                request_id=request.request_id,
                model_id=MODEL,
                n_prompt=len(request.prompt),
                n_output=request.spec.n_output,
                block_length=BLOCK,
                arrival_s=request.arrival_s,
                slo_ms=request.level.slo_ms,
                priority=request.level.priority,
                min_confidence=request.level.min_confidence,
            )
        )
        self.at(1.0, lambda: self._ask(request))

    # --- network -------------------------------------------------------------------------------

    def to_core(self, event: Message) -> None:
        """A message to whatever scheduler is there when it arrives."""
        self._deliver(lambda: self.feed(event))  # type: ignore[arg-type]

    def to_worker(self, instance_id: str, command: StepCommand) -> None:
        """A command to an instance, if that is there when it arrives."""

        def arrive() -> None:
            for worker in self.workers.values():
                if worker.info.instance_id == instance_id:
                    worker.receive(command)

        self._deliver(arrive)

    def _deliver(self, arrive: Callable[[], None]) -> None:
        for _ in range(1 + (self.rng.random() < self.loss)):
            if not self.partitioned and self.rng.random() >= self.loss:
                slow = self.rng.random() < self.loss
                self.at(self.rng.uniform(0.0, 0.5 if slow else 0.005), arrive)

    # --- scheduler -----------------------------------------------------------------------------

    def start_scheduler(self) -> None:
        """A new scheduler takes over."""
        self._generation += 1
        try:
            term = call(self.store.take_lease("s", ttl_s=1e9))
            records = call(self.store.load(call(self.store.active())))
        except StoreUnavailableError:
            self.at(0.2, self.start_scheduler)
            return
        assert term is not None
        self.core = Core(build_policy(self._policy, PolicyOptions()), self._settings, term=term)
        stored = tuple(to_stored(r, offset_s=0.0) for r in records if r is not None)
        self.feed(Recovered(stored))

    def crash_scheduler(self, down_s: float) -> None:
        """It dies with all its memory, and is started again."""
        self.core = None
        self._generation += 1
        self.at(down_s, self.start_scheduler)

    def feed(self, event: Event) -> None:
        """Give the core an event and carry out what follows."""
        if self.core is not None:
            self._execute(self.core.handle(self.now, event))

    def _tick(self) -> None:
        self._wake_at = None
        if self.core is not None:
            self._execute(self.core.tick(self.now))

    def _execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)
        assert self.core is not None
        wake_at = self.core.wake_at()
        if wake_at is not None and (self._wake_at is None or wake_at < self._wake_at):
            self._wake_at = wake_at
            self.at(max(wake_at - self.now, 0.0) + 1e-6, self._tick)

    def _carry_out(self, effect: Effect) -> None:
        store, generation = self.store, self._generation
        assert self.core is not None
        term = self.core.term

        def answer(event: Event) -> None:
            if generation == self._generation:
                self.feed(event)

        match effect:
            case Send(instance_id, command):
                self.n_sent += 1
                self.to_worker(instance_id, command)
            case Reply(request_id, reply) if isinstance(reply, Admitted | Refused):
                self._deliver(lambda: self.replies.update({request_id: reply}))
            case Admit(op, request_id, owner, min_epoch):
                self._store_call(
                    lambda: call(
                        store.admit(request_id, term=term, owner=owner, min_epoch=min_epoch)
                    ),
                    lambda a: answer(AdmitAnswered(op, request_id, a)),
                )
            case Reassign(op, request_id, owner, expected, _, min_epoch, died):
                self._store_call(
                    lambda: call(
                        store.reassign(
                            request_id,
                            term=term,
                            owner=owner,
                            expected_epoch=expected,
                            min_epoch=min_epoch,
                            owner_died=died,
                        )
                    ),
                    lambda a: answer(ReassignAnswered(op, request_id, a)),
                )
            case Fail(op, request_id, error):
                self._store_call(
                    lambda: call(store.fail(request_id, term=term, error=error)),
                    lambda a: answer(FailAnswered(op, request_id, a)),
                )
            case Load(op, request_ids):
                self._store_call(
                    lambda: call(store.load(request_ids)),
                    lambda records: answer(_loaded(op, request_ids, records)),
                )
            case ListActive():
                self._store_call(
                    lambda: call(store.active()), lambda ids: answer(ActiveListed(tuple(ids)))
                )
            case RaiseTerm(above):
                self._store_call(
                    lambda: call(store.take_lease("s", ttl_s=1e9, min_term=above + 1)),
                    lambda t: answer(TermRaised(t)) if t else None,
                )
            case _:
                pass

    def _store_call(
        self, perform: Callable[[], T], answer: Callable[[T], None], *, scheduler: bool = True
    ) -> None:
        """As the service does it: again until answered; an answer may be lost after the write."""
        generation = self._generation

        def attempt() -> None:
            if scheduler and generation != self._generation and self.rng.random() < 0.5:
                return  # its process died before it was sent
            try:
                result = perform()
            except StoreUnavailableError:
                self.at(0.2, attempt)
                return
            if self.rng.random() < self.loss:
                self.at(0.1, attempt)
            else:
                self.at(self.rng.uniform(0.0, 0.005), lambda: answer(result))

        self.at(self.rng.uniform(0.0, 0.005), attempt)

    # --- store ---------------------------------------------------------------------------------

    def stop_store(self, down_s: float, lost_s: float) -> None:
        """It goes down, and comes back without its last writes."""
        self.store.down = True
        _, data = self._snapshot_before(self.now - lost_s)

        def back() -> None:
            self.store.down = False
            self.store.restore(data)
            self._snapshots = [(self.now - 10.0, data)]
            self.at(self.rng.uniform(0.0, 1.0), lambda: self.feed(StoreRestarted()))

        self.at(down_s, back)

    def _snapshot_before(self, time: float) -> tuple[float, Any]:
        old = [snapshot for snapshot in self._snapshots if snapshot[0] <= time]
        return old[-1] if old else self._snapshots[0]

    def _keep_snapshots(self) -> None:
        self._snapshots.append((self.now, self.store.snapshot()))
        self._snapshots = self._snapshots[-8:]
        self.at(0.25, self._keep_snapshots)

    # --- workers -------------------------------------------------------------------------------

    def start_worker(self, name: str) -> None:
        """A new incarnation."""
        instance_id = f"{name}-{next(self._incarnations):04x}"
        info = make_info(instance_id, name, self._budget, self._weights.get(name, "h"))
        self.workers[name] = worker = Worker(self, info)
        worker.start()

    def crash_worker(self, name: str, down_s: float) -> None:
        """It dies with all it holds, and is started again."""
        self.workers.pop(name, None)
        self.at(down_s, lambda: self.start_worker(name))

    def drain_worker(self, name: str, for_s: float, *, goes: bool) -> None:
        """The planner has it emptied, and says so again and again for so long; then it is replaced
        (`goes`), or the planner has died."""
        until = self.now + for_s

        def ask() -> None:
            worker = self.workers.get(name)
            if worker is not None and self.now < until:
                self.to_core(Drain(instance_id=worker.info.instance_id, hold_s=2.0))
                self.at(0.5, ask)
            elif goes:
                self.leave_worker(name, 1.0)

        ask()

    def leave_worker(self, name: str, away_s: float) -> None:
        """It says goodbye, and another comes."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.to_core(InstanceDown(instance_id=worker.info.instance_id, reason="test"))
        self.at(away_s, lambda: self.start_worker(name))


@dataclass
class Holding:
    """What a worker knows of a request."""

    item: StepItem
    spec: DecodingSpec
    step: int
    canvas: list[int]


@dataclass
class Worker:
    """Follows the protocol of DESIGN section 3, with random tokens."""

    world: World
    info: InstanceInfo
    held: dict[str, Holding] = field(default_factory=dict)
    wanted: dict[str, StepItem] = field(default_factory=dict)
    fenced: dict[str, Holding] = field(default_factory=dict)
    applied: tuple[int, int] = (0, 0)
    batch: int = 0

    @property
    def alive(self) -> bool:
        """Whether it is still the incarnation of its name."""
        return self.world.workers.get(self.info.name) is self

    def start(self) -> None:
        """Join, and keep going."""
        self.world.to_core(InstanceUp(info=self.info))
        self._beat()
        self._step()

    def receive(self, command: StepCommand) -> None:
        """Apply a command."""
        if (command.term, command.seq) <= self.applied:
            return
        self.applied = (command.term, command.seq)
        for item in command.items:
            held, wanted = self.held.get(item.request_id), self.wanted.get(item.request_id)
            epochs = [x.epoch for x in (held and held.item, wanted) if x]
            if item.epoch < max(epochs, default=0):
                continue
            if held is not None and held.item.epoch == item.epoch:
                held.item = item
            else:
                self.wanted[item.request_id] = item
        for release in command.releases:
            for table in (self.held, self.wanted):
                x = table.get(release.request_id)
                if x and (x.item if isinstance(x, Holding) else x).epoch <= release.epoch:
                    del table[release.request_id]

    def _beat(self) -> None:
        if not self.alive:
            return
        holds = [
            Held(request_id=key, epoch=h.item.epoch, step=h.step) for key, h in self.held.items()
        ]
        term, seq = self.applied
        self.world.to_core(
            Heartbeat(info=self.info, term=term, seq=seq, n_free_kv_tokens=0, holds=holds)
        )
        self.world.at(0.25, self._beat)

    def _step(self) -> None:
        if not self.alive:
            return
        try:
            self._load()
            self._pass()
        except StoreUnavailableError:
            pass
        self.world.at(self.world.rng.uniform(0.02, 0.1), self._step)

    def _load(self) -> None:
        rejected = []
        for request_id, item in list(self.wanted.items()):
            (record,) = call(self.world.store.load([request_id]))
            del self.wanted[request_id]
            reason = self._refusal(item, record)
            if reason is not None:
                rejected.append(Rejected(request_id=request_id, epoch=item.epoch, reason=reason))
                if reason != "unknown" or record is None:
                    self.held.pop(request_id, None)
                continue
            assert record is not None
            known = self.held.get(request_id) or self.fenced.pop(request_id, None)
            if known is not None and _continues(known, record):
                self.held[request_id] = Holding(item, known.spec, known.step, known.canvas)
            else:
                spec = record.request.spec
                self.held[request_id] = Holding(item, spec, record.step, list(record.canvas))
        if rejected:
            self._report([], rejected)

    def _refusal(self, item: StepItem, record: RequestRecord | None) -> Any:
        if record is None or record.epoch < item.epoch:
            return "unknown"
        if record.state in ("done", "cancelled", "failed"):
            return "terminal"
        if record.epoch > item.epoch or record.owner != self.info.instance_id:
            return "fenced"
        return None

    def _pass(self) -> None:
        rows = [(key, h) for key, h in self.held.items() if _may_run(h)]
        if not rows:
            return
        results = []
        for key, holding in rows:
            results.append(self._advance(key, holding))
        self._report(results, [])

    def _advance(self, request_id: str, holding: Holding) -> StepItemResult:
        block = _block(holding)
        masked = [p for p in _positions(holding, block) if holding.canvas[p] == MASKED]
        positions = sorted(self.world.rng.sample(masked, self.world.rng.randint(1, len(masked))))
        canvas = list(holding.canvas)
        for position in positions:
            canvas[position] = self.world.rng.randrange(1000)
        commit = Commit(
            request_id=request_id,
            epoch=holding.item.epoch,
            step=holding.step + 1,
            block=block,
            kind="cache",
            threshold=holding.item.threshold,
            worker=self.info.instance_id,
            latency_ms=1.0,
            positions=positions,
            tokens=[canvas[p] for p in positions],
            confidences=[0.5] * len(positions),
            stats=STATS,
            weights_hash=self.info.weights_hash,
            finish_reason=None if MASKED in canvas else "length",
        )
        outcome = self._commit(commit, canvas)
        if outcome in ("committed", "duplicate"):
            holding.step, holding.canvas = commit.step, canvas
            if commit.finish_reason:
                del self.held[request_id]
        else:
            self.held.pop(request_id)
            if outcome == "fenced":
                self.fenced[request_id] = holding
        return StepItemResult(
            request_id=request_id,
            epoch=commit.epoch,
            step=commit.step,
            block=block,
            kind="cache",
            threshold=commit.threshold,
            outcome=outcome,
            n_new=len(positions),
            n_unmasked=len(canvas) - canvas.count(MASKED),
            n_block_masked=sum(canvas[p] == MASKED for p in _positions(holding, block)),
            confidence=STATS,
            finish_reason=commit.finish_reason,
        )

    def _commit(self, commit: Commit, canvas: list[int]) -> Any:
        (outcome,) = call(self.world.store.commit([commit]))
        if outcome == "gap":
            (outcome,) = call(self.world.store.commit([_whole(commit, canvas)]))
        return outcome

    def _report(self, items: list[StepItemResult], rejected: list[Rejected]) -> None:
        self.batch += 1
        self.world.to_core(
            StepResult(
                instance_id=self.info.instance_id,
                batch=self.batch,
                latency_ms=50.0 if items else 0.0,
                n_tokens=len(items),
                items=items,
                rejected=rejected,
            )
        )


def make_info(
    instance_id: str, name: str = "", budget: int = 256, weights_hash: str = "h"
) -> InstanceInfo:
    """An instance of the test model."""
    return InstanceInfo(
        instance_id=instance_id,
        name=name or instance_id.rpartition("-")[0],
        model_id=MODEL,
        weights_hash=weights_hash,
        tp_degree=1,
        cache_mode="dual",
        block_length=BLOCK,
        max_batch_tokens=budget,
        n_kv_tokens=budget,
        max_sequence_length=budget,
        host="here",
        pid=1,
    )


def _loaded(op: int, request_ids: tuple[str, ...], records: list[RequestRecord | None]) -> Loaded:
    return Loaded(
        op,
        tuple(to_stored(r, offset_s=0.0) for r in records if r is not None),
        tuple(i for i, r in zip(request_ids, records, strict=True) if r is None),
    )


def _block(holding: Holding) -> int:
    return holding.canvas.index(MASKED) // holding.spec.block_length


def _positions(holding: Holding, block: int) -> range:
    length = holding.spec.block_length
    return range(block * length, min((block + 1) * length, holding.spec.n_output))


def _may_run(holding: Holding) -> bool:
    item = holding.item
    in_step = item.until_step is None or holding.step + 1 <= item.until_step
    return MASKED in holding.canvas and in_step and _block(holding) <= item.until_block


def _continues(ours: Holding, record: RequestRecord) -> bool:
    return ours.step >= record.step and all(
        s in (MASKED, t) for s, t in zip(record.canvas, ours.canvas, strict=True)
    )


def _whole(commit: Commit, canvas: list[int]) -> Commit:
    import msgspec

    return msgspec.structs.replace(commit, canvas=canvas)
