"""The scheduler's settings and what they are turned into."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilaserve.errors import SettingsError
from dilaserve.profiles import ProfileError
from dilaserve.settings import load
from dilaserve_scheduler.settings import SchedulerSettings


def test_defaults() -> None:
    settings = load(SchedulerSettings, {})
    assert settings.policy == "dilaserve"
    assert settings.core().run_ahead is None
    assert settings.core().dead_after_s == 2.0
    options = settings.options()
    assert options.threshold == 0.9
    assert options.thresholds == (0.5, 0.6, 0.7, 0.8, 0.9)
    assert (options.slo_s, options.overhead, options.profiles) == (30.0, None, None)


def test_a_profile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(
        '{"model": "m", "device": "d", "profiles": [{"tp_degree": 1, "points": [[32, 0.01]]}]}'
    )
    options = load(SchedulerSettings, {"DILASERVE_PROFILE": str(path)}).options()
    assert options.profiles is not None
    assert options.profiles.curve(1).seconds(10) == 0.01
    with pytest.raises(ProfileError, match="cannot be read"):
        derive({"DILASERVE_PROFILE": str(tmp_path / "absent.json")})


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
        ("THRESHOLDS", "0.9,0.5"),
        ("THRESHOLDS", "low,high"),
        ("THRESHOLDS", "0.5,1.5"),
        ("SLO_MS", "0"),
        ("MARGIN", "1.1"),
        ("OVERHEAD", "-1"),
        ("REFRESH_TOKENS", "-1"),
    ],
)
def test_what_makes_no_sense_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"DILASERVE_{variable}="):
        derive({f"DILASERVE_{variable}": value})


def derive(environ: dict[str, str]) -> None:
    settings = load(SchedulerSettings, environ)
    settings.core()
    settings.options()


def test_the_predictor_says_how_often_it_is_asked_unless_told() -> None:
    usual = load(SchedulerSettings, {}).options()
    assert (usual.refresh_tokens, usual.refresh_as_predicted) == (8, True)
    told = load(SchedulerSettings, {"DILASERVE_REFRESH_TOKENS": "5"}).options()
    assert (told.refresh_tokens, told.refresh_as_predicted) == (5, False)
