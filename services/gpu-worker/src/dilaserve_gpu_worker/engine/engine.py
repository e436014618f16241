"""The engine: holds requests and their KV pages, and denoises them one forward pass at a time.

Runs in one thread; requests join and leave between passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from operator import attrgetter

from dilaserve.messages import CacheMode
from dilaserve_gpu_worker.attention import choose_attention
from dilaserve_gpu_worker.engine.batch import Batch, build_batch, place_of
from dilaserve_gpu_worker.engine.budget import PassBudget
from dilaserve_gpu_worker.engine.commit import unmask_rows
from dilaserve_gpu_worker.engine.graphs import GraphOptions
from dilaserve_gpu_worker.engine.kv_pool import (
    PAGE_TOKENS,
    PageAllocator,
    n_pages_for,
    slots_of,
)
from dilaserve_gpu_worker.engine.plan_policy import BlockServe, PlanPolicy
from dilaserve_gpu_worker.engine.runner import Scores, make_runner
from dilaserve_gpu_worker.engine.sequence import Row, Sequence
from dilaserve_gpu_worker.engine.types import BatchOutput, Credit, EngineRequest
from dilaserve_gpu_worker.engine.validate import Limits
from dilaserve_gpu_worker.models.model import Model


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of one pass, sorted (see batch.place_of)."""

    rows: list[Row]
    started_s: float

    @property
    def n_tokens(self) -> int:
        """Tokens computed, padding left out."""
        return sum([row.n_tokens for row in self.rows])


class Engine:
    """Denoises the requests added to it, as far as their credit goes.

    n_kv_tokens: size of the KV pool, rounded down to whole pages; unused without a cache.
    max_batch_tokens: most tokens computed in one pass.
    eos_ids, mask_id: of the model, by default what its config says.
    attention: name of the attention backend, see attention.choose_attention.
    plan_policy: chooses the rows of a pass; its own, BlockServe by default.
    graphs: how to capture passes of cache steps; None: not at all.
    share: told of each batch before it is computed, so that other ranks compute it too.
    """

    def __init__(
        self,
        model: Model,
        *,
        cache_mode: CacheMode,
        n_kv_tokens: int,
        max_batch_tokens: int,
        eos_ids: Set[int] | None = None,
        mask_id: int | None = None,
        attention: str = "auto",
        plan_policy: PlanPolicy | None = None,
        graphs: GraphOptions | None = None,
        counter: Callable[[], float] = time.perf_counter,
        share: Callable[[Batch], None] | None = None,
    ) -> None:
        self._config = model.config
        self._cache_mode: CacheMode = cache_mode
        self._eos_ids = model.config.eos_ids if eos_ids is None else eos_ids
        self._mask_id = model.config.mask_id if mask_id is None else mask_id
        self._policy = BlockServe() if plan_policy is None else plan_policy
        self._counter = counter
        self._share = share
        self._n_pages = 0 if cache_mode == "none" else n_kv_tokens // PAGE_TOKENS
        self._pages = PageAllocator(self._n_pages)
        self.limits = Limits(
            vocab_size=model.config.vocab_size,
            max_sequence_length=model.config.max_sequence_length,
            max_batch_tokens=max_batch_tokens,
            n_kv_tokens=None if cache_mode == "none" else self._n_pages * PAGE_TOKENS,
        )
        """What can be added at all."""
        self.attention = choose_attention(attention, model.config, model.device, model.dtype)
        """Name of the attention backend."""
        self.dtype = str(model.dtype).removeprefix("torch.")
        """Name of the type of activations, keys and values."""
        self.products = "packed" if model.is_packed else "plain"
        """What the weight matrices are, see models.products."""
        self.kernels = "fused" if model.is_fused else "torch"
        """What computes between products and attention, see Model.is_fused."""
        self._runner = make_runner(
            model,
            None if cache_mode == "none" else self._n_pages,
            self.attention,
            mask_id=self._mask_id,
            graphs=graphs,
        )
        self._sequences: dict[str, Sequence] = {}
        self._n_passes = 0
        self._n_full_tokens: int | None = None

    # --- between passes -------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Hold a request, at any step of its life; it waits inside until KV pages are free.

        In the middle of a block, with a cache, its first pass rebuilds the cache.
        Raises NeverFitsError when it could not run even alone, InvalidRequestError when it is
        malformed, ValueError when its id is held already.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is held already; remove it first")
        self.limits.check(request)
        self._sequences[request.request_id] = Sequence(
            request,
            mask_id=self._mask_id,
            eos_ids=self._eos_ids,
            is_shifted=self._config.logit_shift > 0,
        )

    def set_credit(self, request_id: str, credit: Credit) -> None:
        """Replace the credit of a request that is held."""
        self._sequences[request_id].credit = credit

    def limit_recomputes(self, n_tokens: int | None) -> None:
        """Most tokens of the rows of a pass that compute their whole length; one such row always
        may run. None: no limit but that of the pass."""
        self._n_full_tokens = n_tokens

    def remove(self, request_id: str) -> None:
        """Forget a request and free its pages; nothing happens when it is not held."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._policy.ended(request_id)
            self._free_pages(sequence)

    def holds(self, request_id: str) -> bool:
        """Whether the request was added and not removed."""
        return request_id in self._sequences

    def canvas(self, request_id: str) -> list[int]:
        """Its canvas after its last step, store.records.MASKED where masked."""
        return self._sequences[request_id].canvas()

    def step_of(self, request_id: str) -> int:
        """Number of its last step."""
        return self._sequences[request_id].step

    def has_work(self) -> bool:
        """Whether `plan` would find a row to run."""
        return any(True for _ in self._ready())

    @property
    def n_free_kv_tokens(self) -> int:
        """Tokens that fit into the free pages of the KV pool."""
        return self._pages.n_free * PAGE_TOKENS

    @property
    def n_replays(self) -> int:
        """Passes that were not computed step by step but replayed, see graphs."""
        return self._runner.n_replays

    # --- a pass ---------------------------------------------------------------------------------

    def step(self) -> BatchOutput | None:
        """One pass over what may run now; None when nothing may."""
        plan = self.plan()
        if plan is None:
            return None
        return self.unmask(plan, self.forward(plan))

    def plan(self) -> Plan | None:
        """Choose the rows of the next pass, by the plan policy and within the token budget; takes
        the pages that they need. None when no row may run."""
        started_s = self._counter()
        rows = [sequence.next_row(self._cache_mode) for sequence in self._ready()]
        if not rows:
            return None
        budget = PassBudget(self.limits.max_batch_tokens, self._n_full_tokens)
        chosen = self._policy.choose(rows, budget)
        for row in chosen:
            if not row.sequence.pages:
                self._take_pages(row.sequence)
        return Plan(sorted(chosen, key=place_of), started_s)

    def forward(self, plan: Plan) -> Scores:
        """Logits of the masked positions of the rows' blocks, and how confident the model is of
        later blocks; fills the KV pool."""
        batch = build_batch(plan.rows, self._config.logit_shift)
        if self._share is not None:
            self._share(batch)
        return self._runner.forward(batch)

    def unmask(self, plan: Plan, scores: Scores) -> BatchOutput:
        """Commit to the canvases what the logits decide, and report it."""
        self._n_passes += 1
        for row in plan.rows:
            row.sequence.last_pass = self._n_passes
            row.sequence.cached_block = row.block
        steps = unmask_rows(plan.rows, scores.logits_MV, scores.outlook_K, self._mask_id)
        rows = [row for row in plan.rows if row.kind != "rebuild"]
        for row in rows:
            if row.sequence.finish_reason is not None:
                self._free_pages(row.sequence)
                self._policy.ended(row.request_id)
        return BatchOutput(
            latency_s=self._counter() - plan.started_s,
            n_tokens=plan.n_tokens,
            n_rebuilds=len(plan.rows) - len(rows),
            steps=steps,
        )

    # --- what can run ---------------------------------------------------------------------------

    def _ready(self) -> Iterator[Sequence]:
        """Sequences that can run now, least recently run first (then oldest). One that waits for
        pages keeps them from those behind it, so that none starves."""
        batch = self._policy.batch
        runnable = [
            sequence
            for sequence in self._sequences.values()
            if sequence.may_run() and (batch is None or sequence.request_id in batch)
        ]
        n_promised, has_room = 0, True
        for sequence in sorted(runnable, key=attrgetter("last_pass")):
            n_wanted = self._n_pages_wanted(sequence)
            if n_wanted:
                n_promised += n_wanted
                has_room = has_room and n_promised <= self._pages.n_free
            if has_room or not n_wanted:
                yield sequence

    def _n_pages_wanted(self, sequence: Sequence) -> int:
        if self._cache_mode == "none" or sequence.pages:
            return 0
        return n_pages_for(sequence.n_tokens)

    def _take_pages(self, sequence: Sequence) -> None:
        n_wanted = self._n_pages_wanted(sequence)
        if n_wanted:
            sequence.pages = self._pages.take(n_wanted)
            sequence.slots = slots_of(sequence.pages, sequence.n_tokens)

    def _free_pages(self, sequence: Sequence) -> None:
        self._pages.give_back(sequence.pages)
        sequence.pages, sequence.slots, sequence.cached_block = [], sequence.slots[:0], None
