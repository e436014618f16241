"""`python -m dilaserve_gateway.check`: whether a gateway would start. See dilaserve.checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dilaserve.checks import Checked, answer
from dilaserve.settings import load
from dilaserve_gateway.model import load_model
from dilaserve_gateway.settings import GatewaySettings

__all__ = ["check_start"]


def main() -> None:
    """Exit code 0 with what there is, 3 with what is wrong."""
    answer(lambda: check_start(os.environ))


def check_start(environ: Mapping[str, str]) -> Checked:
    """The settings, the tokenizer and the chat template. Raises SettingsError,
    ModelFolderError."""
    settings = load(GatewaySettings, environ)
    model = load_model(Path(settings.model), settings.model_name)
    template = "a chat template" if model.template else "no chat template"
    n_ends = len(model.eos_ids)
    return Checked(
        detail=f"tokenizer with {template}, {n_ends} token{'s' * (n_ends != 1)} to end an answer; "
        "not checked: whether it is the tokenizer of these weights",
        doubts=model.doubts,
    )


if __name__ == "__main__":
    main()
