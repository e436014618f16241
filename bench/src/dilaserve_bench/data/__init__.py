"""Published figures that the twin runs on, typed with their source (see each file)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["AverageDay", "ClassMix", "average_day", "data_file", "sharegpt_classes"]

T = TypeVar("T")


class AverageDay(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals a second in each of 24 slots."""

    slot_s: float
    rates: list[float]


class ClassMix(msgspec.Struct, frozen=True, kw_only=True):
    """(prompt length, output length, share on any scale), lengths in tokens."""

    classes: list[tuple[int, int, float]]


def average_day() -> AverageDay:
    """The paper's average day (section 5.1), peaking at 20 arrivals a second."""
    return _read("average_day.json", AverageDay)


def sharegpt_classes() -> ClassMix:
    """The sizes of its conversations, rounded up to 256 tokens."""
    return _read("sharegpt_classes.json", ClassMix)


def data_file(name: str) -> Path:
    """A file of this package, such as h100_llada.json or gsm8k_llada_steps.json."""
    return Path(str(files(__name__).joinpath(name)))


def _read(name: str, kind: type[T]) -> T:
    return msgspec.json.decode(data_file(name).read_bytes(), type=kind)
