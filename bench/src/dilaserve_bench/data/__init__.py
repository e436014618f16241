"""Published figures that the twin runs on, typed with their source (see each file)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = [
    "AverageDay",
    "ClassMix",
    "PublishedCurve",
    "PublishedCurves",
    "PublishedDay",
    "PublishedDays",
    "average_day",
    "data_file",
    "gsm8k_curves",
    "published_days",
    "sharegpt_classes",
]

T = TypeVar("T")


class AverageDay(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals a second in each of 24 slots."""

    slot_s: float
    rates: list[float]


class ClassMix(msgspec.Struct, frozen=True, kw_only=True):
    """(prompt length, output length, share on any scale), lengths in tokens."""

    classes: list[tuple[int, int, float]]


class PublishedCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One system's, in the order of rates or of SLOs."""

    attainment_by_rate: list[float]
    accuracy_by_rate: list[float]
    attainment_by_slo: list[float]


class PublishedCurves(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per second and GPU, at the loosest SLO; SLOs are multiples of the base, at the
    lowest rate."""

    rates: list[float]
    base_slo_s: float
    slo_multiples: list[float]
    systems: dict[str, PublishedCurve]


class PublishedDay(msgspec.Struct, frozen=True, kw_only=True):
    """One system's over the 2-hour trace."""

    low: float
    """Attainment in the first 45 minutes."""
    loaded: float
    """Attainment from then on."""
    attainment: list[float]
    """In each slot."""
    mean_threshold: list[float]
    """The same; empty where thresholds are fixed."""


class PublishedDays(msgspec.Struct, frozen=True, kw_only=True):
    """By policy."""

    slot_s: float
    systems: dict[str, PublishedDay]


def average_day() -> AverageDay:
    """The paper's average day (section 5.1), peaking at 20 arrivals a second."""
    return _read("average_day.json", AverageDay)


def sharegpt_classes() -> ClassMix:
    """The sizes of its conversations, rounded up to 256 tokens."""
    return _read("sharegpt_classes.json", ClassMix)


def gsm8k_curves() -> PublishedCurves:
    """The paper's Figure 10 for LLaDA on GSM8K."""
    return _read("gsm8k_slo_curves.json", PublishedCurves)


def published_days() -> PublishedDays:
    """The paper's Figure 8 and Table 5."""
    return _read("realday_published.json", PublishedDays)


def data_file(name: str) -> Path:
    """A file of this package, such as h100_llada.json or gsm8k_llada_steps.json."""
    return Path(str(files(__name__).joinpath(name)))


def _read(name: str, kind: type[T]) -> T:
    return msgspec.json.decode(data_file(name).read_bytes(), type=kind)
