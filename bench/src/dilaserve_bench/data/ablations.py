"""The paper's ablations as far as their numbers are published (ablations.json)."""

from __future__ import annotations

import msgspec

from dilaserve_bench.data import data_file

__all__ = ["Ablations", "Migration", "ThresholdControl", "Tradeoff", "ablations"]


class Tradeoff(msgspec.Struct, frozen=True, kw_only=True):
    """Figure 3: LLaDA-8B on 1,000 problems of GSM8K. Mixed: each step at one of two thresholds."""

    thresholds: list[float]
    accuracy: list[float]
    mean_steps: list[float]
    mixed: tuple[float, float]
    share_of_high: list[float]
    mixed_accuracy: list[float]
    mixed_mean_steps: list[float]


class ThresholdControl(msgspec.Struct, frozen=True, kw_only=True):
    """Figure 11, by what is switched on; rates per second and GPU."""

    machine: str
    rates: list[float]
    attainment: dict[str, list[float]]
    mean_threshold: dict[str, list[float]]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Figure 13, whose curves are not published; points are those that the paper's text gives."""

    machine: str
    lone_request_s: dict[str, float]
    most_points_by_input: float
    most_points_by_output: float


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """Table 6: latency with migration at any step, over that with recompute steps only."""

    instances: list[int]
    normalised_latency: list[float]


class Ablations(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    source: str
    tradeoff: Tradeoff
    scheduling_share: dict[str, float]
    """Figure 9b: time of the scheduler over the time of a denoising step."""
    threshold_control: ThresholdControl
    lengths: Lengths
    cache_step_migration: Migration


def ablations() -> Ablations:
    """From the file."""
    return msgspec.json.decode(data_file("ablations.json").read_bytes(), type=Ablations)
