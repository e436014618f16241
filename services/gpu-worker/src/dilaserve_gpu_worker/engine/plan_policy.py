"""Plan policies: which of the rows that may run make up the next pass. One for an engine.

The worker's engine and the digital twin's plan with the same ones. They know kinds and lengths of
rows, and no canvas, tensor or clock.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal, Protocol, TypeVar

from dilaserve_gpu_worker.engine.budget import PassBudget
from dilaserve_gpu_worker.engine.sequence import RowKind

__all__ = [
    "PLAN_TOKENS",
    "BlockServe",
    "PlanPolicy",
    "PlanPolicyName",
    "PlanRow",
    "Sangam",
    "Static",
    "build_plan_policy",
]

PlanPolicyName = Literal["blockserve", "sangam", "static"]
PLAN_TOKENS = 1280
"""What a pass has on average under sangam, unless it is told otherwise: what was best for requests
of 1,331 tokens on an H100, and no loss for those of 2,048 (`dilaserve experiment planpolicies`)."""
LEAST_SHARE = 8
"""However many tokens the cache rows have, rows that compute their whole length gain at least one
in so many of the pass's, so that each has its turn."""


class PlanRow(Protocol):
    """A request's part of the next pass, if it is in it."""

    @property
    def request_id(self) -> str:
        """Whose it is."""
        ...

    @property
    def kind(self) -> RowKind:
        """What it computes: its block (cache), or the whole length."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens computed."""
        ...

    @property
    def n_keys(self) -> int:
        """Tokens of the whole request: what its longest row computes."""
        ...


RowT = TypeVar("RowT", bound=PlanRow)


class PlanPolicy(Protocol):
    """Asked once for each pass; what it remembers is about passes, not about texts, which are the
    same under every policy."""

    @property
    def batch(self) -> Set[str] | None:
        """The requests that alone may be in the next pass; None: anybody may."""
        ...

    def choose(self, rows: Sequence[RowT], budget: PassBudget) -> list[RowT]:
        """Those that make up the pass; at least one if there is any. `rows` are all of `batch`
        that can run, least recently run first. `budget` is that of the pass, and has the last
        word: its limit of rows that compute their whole length is the scheduler's
        (StepCommand.recompute_tokens)."""
        ...

    def ended(self, request_id: str) -> None:
        """A request has had its last step here. May be said again, and of any."""
        ...


class BlockServe:
    """Whoever can run takes part, as far as the tokens of the pass go: who ends leaves at once,
    another takes the place, rows of all kinds are mixed."""

    batch: Set[str] | None = None

    def choose(self, rows: Sequence[RowT], budget: PassBudget) -> list[RowT]:
        """See PlanPolicy."""
        return [row for row in rows if budget.take(row.kind, row.n_tokens)]

    def ended(self, request_id: str) -> None:
        """See PlanPolicy."""


class Sangam:
    """BlockServe over the cache rows, and over as many of the rows that compute their whole length
    (indivisible, since attention goes both ways) as a deficit budget allows.

    Each pass earns `n_tokens` less those of its cache rows. What is not spent is carried forward,
    but no more than one pass's worth, or what the row at the head of the line needs. The line is in
    the order of last runs; nobody passes its head. Where there is no cache row to be held up, its
    head runs at once. After the abstract of "Sangam", a serving system for cached dLLM inference.
    """

    batch: Set[str] | None = None

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self._least = max(n_tokens // LEAST_SHARE, 1)
        self._carried = 0

    def choose(self, rows: Sequence[RowT], budget: PassBudget) -> list[RowT]:
        """See PlanPolicy."""
        line = [row for row in rows if row.kind != "cache"]
        n_cache = sum(row.n_tokens for row in rows if row.kind == "cache")
        earned = self._carried + max(self._n_tokens - n_cache, self._least)
        n_due = _n_affordable(line, earned)
        if line and len(line) == len(rows):
            n_due = max(n_due, 1)
        waits = {row.request_id for row in line[n_due:]}
        chosen = [
            row
            for row in rows
            if row.request_id not in waits and budget.take(row.kind, row.n_tokens)
        ]
        self._carry(earned, line, chosen)
        return chosen

    def ended(self, request_id: str) -> None:
        """See PlanPolicy."""

    def _carry(self, earned: int, line: Sequence[RowT], chosen: Sequence[RowT]) -> None:
        ran = {row.request_id for row in chosen}
        n_spent = sum(row.n_tokens for row in line if row.request_id in ran)
        n_needed = next((row.n_tokens for row in line if row.request_id not in ran), 0)
        self._carried = min(max(earned - n_spent, 0), max(self._n_tokens, n_needed))


class Static:
    """The baseline: a batch is filled once, with as many as can run in one pass, and the next one
    waits until the slowest of it has ended. Who ends earlier leaves it, and its place stays empty
    (what it costs to compute the empty places too, `dilaserve bench engine` shows).

    A member that waits for credit holds up the next batch, too.
    """

    def __init__(self) -> None:
        self._batch: set[str] = set()

    @property
    def batch(self) -> Set[str] | None:
        """See PlanPolicy."""
        return self._batch or None

    def choose(self, rows: Sequence[RowT], budget: PassBudget) -> list[RowT]:
        """See PlanPolicy."""
        if not self._batch:
            self._fill(rows, budget.n_left)
        return [
            row
            for row in rows
            if row.request_id in self._batch and budget.take(row.kind, row.n_tokens)
        ]

    def ended(self, request_id: str) -> None:
        """See PlanPolicy."""
        self._batch.discard(request_id)

    def _fill(self, rows: Sequence[RowT], n_left: int) -> None:
        for row in rows:
            if row.n_keys <= n_left:
                n_left -= row.n_keys
                self._batch.add(row.request_id)


def build_plan_policy(name: PlanPolicyName, *, n_tokens: int = PLAN_TOKENS) -> PlanPolicy:
    """A fresh one. `n_tokens`: sangam's, see there."""
    match name:
        case "blockserve":
            return BlockServe()
        case "sangam":
            return Sangam(n_tokens)
        case "static":
            return Static()


def _n_affordable(line: Sequence[PlanRow], n_tokens: int) -> int:
    """How many of the line, from its head, cost no more than `n_tokens` together."""
    for n, row in enumerate(line):
        n_tokens -= row.n_tokens
        if n_tokens < 0:
            return n
    return len(line)
