"""The paper's Figure 4 as far as its numbers are published (tp_effect.json)."""

from __future__ import annotations

import msgspec

from dilaserve_bench.data import data_file

__all__ = ["TpEffect", "tp_effect"]


class TpEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a request. Rates are arrivals a second of a cluster of 8 GPUs."""

    source: str
    lone_s: dict[str, list[float]]
    """By cache, for TP-1, TP-2 and TP-4."""
    rates: list[float]
    loaded_s: dict[str, list[float]]
    """By mix, for each rate."""


def tp_effect() -> TpEffect:
    """From the file."""
    return msgspec.json.decode(data_file("tp_effect.json").read_bytes(), type=TpEffect)
