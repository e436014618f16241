"""Experiments by name. Nothing of them is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS", "load_experiment"]

EXPERIMENTS = {
    "calibration": "calibration:EXPERIMENT",
    "ahead": "ahead:AHEAD",
    "overhead": "ahead:OVERHEAD",
    "ablation": "ablation:ABLATION",
    "fig3": "fig3:FIGURE_3",
    "fig4": "fig4:FIGURE_4",
    "fig9": "fig9:FIGURE_9",
    "fig10": "calibration:FIGURE_10",
    "fig11": "ablation:FIGURE_11",
    "fig12": "fig12:FIGURE_12",
    "fig13": "fig13:FIGURE_13",
    "table6": "table6:TABLE_6",
    "realday": "realday:EXPERIMENT",
    "quality": "quality:EXPERIMENT",
    "deciding": "deciding:EXPERIMENT",
    "live": "live:EXPERIMENT",
    "planning": "planning:EXPERIMENT",
    "planpolicies": "planpolicies:EXPERIMENT",
    "predictor": "predictor:EXPERIMENT",
    "fig6": "predictor:EXPERIMENT",
    "fig7": "predictor:EXPERIMENT",
    "fig8": "replanned:FIGURE_8",
    "table5": "replanned:TABLE_5",
}
"""Name → module of this package and its Experiment. Names of figures and tables that are another
experiment's lead there too."""


def load_experiment(name: str) -> Experiment[Any]:
    """Raises DiLaServeError for an unknown name."""
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise DiLaServeError(f"experiment {name!r} is unknown; use list, or one of {known}")
    module, _, attribute = EXPERIMENTS[name].partition(":")
    experiment = getattr(import_module(f"dilaserve_bench.experiments.{module}"), attribute)
    assert isinstance(experiment, Experiment)
    return experiment
