"""What is kept of a plan: its inputs, how far the optimisation got, the verdict and its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from dilaserve.messages import CacheMode
from dilaserve_reconfigurator.execution import End
from dilaserve_reconfigurator.outcomes import Observed
from dilaserve_reconfigurator.snapshot import Pace, PlanningError, RequestClass
from dilaserve_reconfigurator.solving import Outcome
from dilaserve_reconfigurator.stage2 import Transition

__all__ = ["CarriedOut", "Inputs", "Mix", "PlanRecord", "Plans", "Verdict", "mix_text"]

Verdict = Literal["change", "keep", "hold"]
"""`hold`: there was nothing to decide with; whatever runs stays."""


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A mix of TP degrees and what it is predicted to do; None where it cannot serve the load."""

    counts: dict[int, int]
    """Instances by TP degree."""
    mean_threshold: float | None = None
    mean_slack: float | None = None
    """Share of the SLO that is left when a mean request ends."""
    mean_latency_s: float | None = None
    loads: dict[int, float] = {}
    """Instances' worth of work, by degree, at the planned rates."""
    batch_sizes: dict[int, tuple[int, int]] = {}
    """Tokens of a recompute and of a cache pass, by degree that has work."""


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan was made for."""

    classes: list[RequestClass]
    nodes: list[int]
    """GPUs of each node."""
    paces: list[Pace]
    degrees: list[int]
    block_length: int
    cache_mode: CacheMode
    rate_factor: float
    seen_s: float
    """Observed part of the window."""
    n_requests: int
    unreachable: list[int] = []
    """Classes whose SLO no mix can meet: they are served regardless of it."""


class CarriedOut(msgspec.Struct, frozen=True, kw_only=True):
    """How carrying a plan out went."""

    phase: End
    """See Execution; what was cut short is finished later."""
    reason: str = ""
    """Why it is not done."""
    seconds: float = 0.0
    lowest: int = 0
    """Fewest GPUs that served on the way."""
    floor: int = 0
    """GPUs that were to serve all the time."""
    pause_s: float = 0.0
    """Seconds in which fewer served than that, or none."""


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One plan."""

    plan_id: str
    made_at_s: float
    verdict: Verdict
    reasons: list[str]
    present: Mix
    target: Mix
    """Equal to `present` where nothing is to change."""
    inputs: Inputs | None = None
    best: Outcome | None = None
    """How Stage 1 went for the best mix."""
    as_it_is: Outcome | None = None
    """And for the present one."""
    moves: Outcome | None = None
    """How Stage 2 went."""
    transition: Transition | None = None
    payback_s: float | None = None
    """Time until the gain has paid for the change."""
    carried_out: CarriedOut | None = None
    """How that went, where it was tried."""
    before: Observed | None = None
    """What was seen before that,"""
    after: Observed | None = None
    """and since."""


def mix_text(counts: Mapping[int, int]) -> str:
    """As people write it: 8×TP-1 + 2×TP-4."""
    parts = [f"{n}×TP-{degree}" for degree, n in sorted(counts.items()) if n]
    return " + ".join(parts) or "nothing"


_decode = msgspec.json.Decoder(PlanRecord).decode


class Plans:
    """Records in a folder, one file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, record: PlanRecord) -> None:
        """Write, or write again. The file is whole at any time. Raises PlanningError where it
        cannot be written."""
        unfinished = self._path(record.plan_id).with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(msgspec.json.encode(record))
            unfinished.replace(self._path(record.plan_id))
        except OSError as error:
            raise PlanningError(
                f"{record.plan_id} cannot be kept in {self._folder}: {error.strerror}; set "
                "DILASERVE_HOME, or DILASERVE_PLANS_DIR, to a folder that can be written to"
            ) from error

    def load(self, plan_id: str) -> PlanRecord:
        """Raises PlanningError for one that is not there or cannot be read."""
        path = self._path(plan_id)
        try:
            return _decode(path.read_bytes())
        except msgspec.DecodeError as error:
            raise PlanningError(f"plan {path} is malformed: {error}; make a new one") from error
        except (FileNotFoundError, ValueError):  # ValueError: no name of a file
            known = ", ".join(self.ids()[-3:]) or "none"
            raise PlanningError(
                f"there is no plan {plan_id!r} in {self._folder}; the latest are: {known}"
            ) from None
        except OSError as error:
            raise PlanningError(f"plan {path} cannot be read: {error.strerror}") from error

    def ids(self) -> list[str]:
        """All of them, oldest first."""
        paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        return [path.stem for path in paths]

    def _path(self, plan_id: str) -> Path:
        return self._folder / f"{Path(plan_id).name}.json"
