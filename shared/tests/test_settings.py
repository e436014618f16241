"""Settings from the environment: every kind of value, and what an error says."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest

from dilaserve.errors import SettingsError
from dilaserve.settings import CommonSettings, describe, load


class ExampleSettings(CommonSettings, frozen=True, kw_only=True):
    """One field of each kind."""

    model: Annotated[str, "model folder"]
    block_length: Annotated[int, "tokens in a block"] = 32
    margin: Annotated[float, "share of the SLO"] = 0.9
    eager: Annotated[bool, "whether to hurry"] = False
    cache_mode: Annotated[Literal["none", "dual"], "KV cache"] = "dual"


def test_reads_every_kind_of_value() -> None:
    settings = load(
        ExampleSettings,
        {
            "DILASERVE_MODEL": "models/tiny",
            "DILASERVE_BLOCK_LENGTH": "16",
            "DILASERVE_MARGIN": "0.5",
            "DILASERVE_EAGER": "true",
            "DILASERVE_CACHE_MODE": "none",
            "DILASERVE_NATS_URL": "nats://a:1,nats://b:2",
        },
    )
    assert (settings.model, settings.block_length, settings.margin) == ("models/tiny", 16, 0.5)
    assert (settings.eager, settings.cache_mode) == (True, "none")
    assert settings.nats_url == "nats://a:1,nats://b:2"


def test_unset_and_empty_take_the_default_and_unknown_ones_are_left_alone() -> None:
    settings = load(
        ExampleSettings,
        {"DILASERVE_MODEL": "m", "DILASERVE_BLOCK_LENGTH": "", "DILASERVE_COLOUR": "red"},
    )
    assert settings == ExampleSettings(model="m")


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("DILASERVE_BLOCK_LENGTH", "x", "use for example 32"),
        ("DILASERVE_BLOCK_LENGTH", "1.5", "use for example 32"),
        ("DILASERVE_MARGIN", "much", r"use for example 0\.9"),
        ("DILASERVE_EAGER", "perhaps", "use for example False"),
        ("DILASERVE_CACHE_MODE", "triple", "use 'none' or 'dual'$"),
    ],
)
def test_malformed_value_names_variable_value_and_remedy(
    variable: str, value: str, remedy: str
) -> None:
    with pytest.raises(SettingsError, match=f"{variable}='{value}': .*{remedy}"):
        load(ExampleSettings, {"DILASERVE_MODEL": "m", variable: value})


def test_missing_value_names_the_variable() -> None:
    with pytest.raises(SettingsError, match="DILASERVE_MODEL not set"):
        load(ExampleSettings, {})


def test_reference_rows_have_name_type_default_and_help() -> None:
    rows = {variable: rest for variable, *rest in describe(ExampleSettings)}
    assert rows["DILASERVE_BLOCK_LENGTH"] == ["int", 32, "tokens in a block"]
    assert rows["DILASERVE_MODEL"] == ["str", msgspec.NODEFAULT, "model folder"]
    assert all(help_text for _, _, help_text in rows.values())


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load(CommonSettings, {}).nats_url = "nats://elsewhere"  # type: ignore[misc]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_no_setting_is_infinite_or_no_number(text: str) -> None:
    with pytest.raises(SettingsError, match=f"DILASERVE_MARGIN='{text}': .*use for example 0.9"):
        load(ExampleSettings, {"DILASERVE_MODEL": "m", "DILASERVE_MARGIN": text})


def test_a_setting_out_of_its_range_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"DILASERVE_METRICS_PORT='70000': .*65535.*example -1"):
        load(ExampleSettings, {"DILASERVE_MODEL": "m", "DILASERVE_METRICS_PORT": "70000"})
