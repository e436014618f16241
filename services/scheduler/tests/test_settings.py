"""The scheduler's settings and what they are turned into."""

from __future__ import annotations

import pytest

from dilaserve.errors import SettingsError
from dilaserve.settings import load
from dilaserve_scheduler.settings import SchedulerSettings


def test_defaults() -> None:
    settings = load(SchedulerSettings, {})
    assert settings.policy == "infaas"
    assert settings.core().run_ahead is None
    assert settings.core().dead_after_s == 2.0
    assert settings.options().threshold == 0.9


def test_lock_step() -> None:
    assert load(SchedulerSettings, {"DILASERVE_RUN_AHEAD": "1"}).core().run_ahead == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RUN_AHEAD", "0"),
        ("RUN_AHEAD", "soon"),
        ("THRESHOLD", "1.5"),
        ("DEAD_AFTER_S", "0"),
        ("QUEUE_LIMIT", "many"),
    ],
)
def test_what_makes_no_sense_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"DILASERVE_{variable}="):
        derive({f"DILASERVE_{variable}": value})


def derive(environ: dict[str, str]) -> None:
    settings = load(SchedulerSettings, environ)
    settings.core()
    settings.options()
