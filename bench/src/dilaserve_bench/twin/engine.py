"""The engine of a virtual instance: chooses the rows of each pass as the worker's engine does, by
the same plan policies, and leaves what a step does to a step source. Computes nothing; a test holds
the two to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from dilaserve.messages import CacheMode, FinishReason
from dilaserve.store.records import MASKED
from dilaserve_bench.twin.source import Course, StepSource
from dilaserve_gpu_worker.engine.budget import PassBudget
from dilaserve_gpu_worker.engine.plan_policy import BlockServe, PlanPolicy
from dilaserve_gpu_worker.engine.sequence import RowKind
from dilaserve_gpu_worker.engine.types import Credit, EngineRequest, StepOutput
from dilaserve_gpu_worker.engine.validate import Limits

__all__ = ["Row", "VirtualEngine", "VirtualPlan"]

PAGE_TOKENS = 32
"""As in the engine's KV pool, whose module needs torch."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One request as the engine holds it: how far it is, and what it may do."""

    request_id: str
    course: Course
    credit: Credit
    n_prompt: int
    n_output: int
    block_length: int
    block: int
    n_block_masked: int
    step: int
    finish_reason: FinishReason | None = None
    n_pages: int = 0
    cached_block: int | None = None
    last_pass: int = 0
    n_tokens: int = field(init=False)
    n_block: int = field(init=False)
    """Positions of the block."""

    def __post_init__(self) -> None:
        self.n_tokens = self.n_prompt + self.n_output
        self.n_block = self._block_size()

    def may_run(self) -> bool:
        credit = self.credit
        return (
            self.finish_reason is None
            and self.block <= credit.until_block
            and (credit.until_step is None or self.step < credit.until_step)
        )

    def next_row(self, cache_mode: CacheMode) -> Row:
        kind: RowKind = "recompute"
        n_tokens = self.n_tokens
        if cache_mode != "none":
            if self.cached_block == self.block:
                kind = "cache"
                is_dual = cache_mode == "dual"
                n_tokens = self.n_block if is_dual else self.n_output - self.block_start()
            elif self.n_block_masked < self.n_block:
                kind = "rebuild"
        return Row(self, kind, n_tokens, self.block)

    def advance(self, step: StepOutput) -> None:
        self.step = step.step
        self.finish_reason = step.finish_reason
        self.n_block_masked = step.n_block_masked
        if step.n_block_masked == 0 and step.finish_reason is None:
            self.block += 1
            self.n_block = self.n_block_masked = self._block_size()

    def block_start(self) -> int:
        return self.block * self.block_length

    def _block_size(self) -> int:
        return min(self.block_length, self.n_output - self.block_start())


@dataclass(slots=True, eq=False)
class Row:
    """One request's part of a pass."""

    sequence: _Sequence
    kind: RowKind
    n_tokens: int
    """Tokens computed."""
    block: int

    @property
    def request_id(self) -> str:
        """See PlanRow."""
        return self.sequence.request_id

    @property
    def n_keys(self) -> int:
        """See PlanRow."""
        return self.sequence.n_tokens


@dataclass(slots=True, eq=False)
class VirtualPlan:
    """The rows of one pass, in the order in which their steps are reported."""

    rows: list[Row]
    n_tokens: int
    n_rebuilds: int


class VirtualEngine:
    """Holds requests and denoises them as far as their credit goes, one pass at a time.

    `n_kv_tokens` is unused without a cache. For everything else see the worker's Engine.
    """

    def __init__(
        self,
        source: StepSource,
        *,
        cache_mode: CacheMode,
        n_kv_tokens: int,
        max_batch_tokens: int,
        max_sequence_length: int,
        plan_policy: PlanPolicy | None = None,
    ) -> None:
        self._source = source
        self._policy = BlockServe() if plan_policy is None else plan_policy
        self._cache_mode: CacheMode = cache_mode
        self._n_pages = 0 if cache_mode == "none" else n_kv_tokens // PAGE_TOKENS
        self._limits = Limits(
            vocab_size=0,  # tokens are not looked at
            max_sequence_length=max_sequence_length,
            max_batch_tokens=max_batch_tokens,
            n_kv_tokens=None if cache_mode == "none" else self._n_pages * PAGE_TOKENS,
        )
        self._n_free_pages = self._n_pages
        self._sequences: dict[str, _Sequence] = {}
        self._n_passes = 0
        self._n_full_tokens: int | None = None

    # --- between passes -------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """See Engine.add."""
        self._limits.check_fits(request)
        length, canvas = request.spec.block_length, request.canvas
        block = (canvas.index(MASKED) if MASKED in canvas else len(canvas) - 1) // length
        self._sequences[request.request_id] = _Sequence(
            request_id=request.request_id,
            course=self._source.begin(request),
            credit=request.credit,
            n_prompt=len(request.prompt),
            n_output=len(canvas),
            block_length=length,
            block=block,
            n_block_masked=canvas[block * length : (block + 1) * length].count(MASKED),
            step=request.step,
        )

    def set_credit(self, request_id: str, credit: Credit) -> None:
        """See Engine.set_credit."""
        self._sequences[request_id].credit = credit

    def limit_recomputes(self, n_tokens: int | None) -> None:
        """See Engine.limit_recomputes."""
        self._n_full_tokens = n_tokens

    def remove(self, request_id: str) -> None:
        """See Engine.remove."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._policy.ended(request_id)
            self._free_pages(sequence)
            sequence.course.end()

    def committed(self, request_id: str) -> None:
        """The store has taken the last step of a request that is held."""
        self._sequences[request_id].course.committed()

    def close(self) -> None:
        """Forget everything."""
        for request_id in list(self._sequences):
            self.remove(request_id)

    @property
    def n_free_kv_tokens(self) -> int:
        """See Engine.n_free_kv_tokens."""
        return self._n_free_pages * PAGE_TOKENS

    # --- a pass ---------------------------------------------------------------------------------

    def plan(self) -> VirtualPlan | None:
        """See Engine.plan. The thresholds of the pass are fixed from now on."""
        ready = [sequence.next_row(self._cache_mode) for sequence in self._ready()]
        if not ready:
            return None
        budget = PassBudget(self._limits.max_batch_tokens, self._n_full_tokens)
        rows = self._policy.choose(ready, budget)
        n_tokens = n_rebuilds = 0
        for row in rows:
            sequence = row.sequence
            if not sequence.n_pages:
                self._take_pages(sequence)
            n_tokens += row.n_tokens
            n_rebuilds += row.kind == "rebuild"
            sequence.course.plan(row.kind, sequence.credit.threshold)
        if len(rows) > 1:
            rows.sort(key=_shape_of)
        return VirtualPlan(rows, n_tokens, n_rebuilds)

    def unmask(self, plan: VirtualPlan) -> list[StepOutput]:
        """See Engine.unmask: the steps of all rows but those that only rebuilt a cache."""
        self._n_passes += 1
        outputs = []
        for row in plan.rows:
            sequence = row.sequence
            sequence.last_pass = self._n_passes
            sequence.cached_block = row.block
            output = sequence.course.run()
            if output is not None:
                sequence.advance(output)
                if output.finish_reason is not None:
                    self._free_pages(sequence)
                    self._policy.ended(sequence.request_id)
                outputs.append(output)
        return outputs

    def all_may_run(self) -> bool:
        """Whether nobody who has steps left waits for credit."""
        return all(s.may_run() or s.finish_reason is not None for s in self._sequences.values())

    # --- what can run ---------------------------------------------------------------------------

    def _ready(self) -> list[_Sequence]:
        """See Engine._ready."""
        runnable = [sequence for sequence in self._sequences.values() if sequence.may_run()]
        batch = self._policy.batch
        if batch is not None:
            runnable = [sequence for sequence in runnable if sequence.request_id in batch]
        if len(runnable) > 1:
            runnable.sort(key=_last_pass_of)
        ready, n_free = [], self._n_free_pages
        for sequence in runnable:
            n_wanted = 0 if sequence.n_pages else self._n_pages_wanted(sequence)
            if n_wanted <= n_free:
                n_free -= n_wanted
                ready.append(sequence)
            else:
                n_free = 0
        return ready

    def _n_pages_wanted(self, sequence: _Sequence) -> int:
        return 0 if self._cache_mode == "none" else -(-sequence.n_tokens // PAGE_TOKENS)

    def _take_pages(self, sequence: _Sequence) -> None:
        n_wanted = self._n_pages_wanted(sequence)
        self._n_free_pages -= n_wanted
        sequence.n_pages += n_wanted

    def _free_pages(self, sequence: _Sequence) -> None:
        self._n_free_pages += sequence.n_pages
        sequence.n_pages, sequence.cached_block = 0, None


def _shape_of(row: Row) -> tuple[int, int]:
    return row.n_tokens, row.sequence.n_tokens


_last_pass_of = attrgetter("last_pass")
