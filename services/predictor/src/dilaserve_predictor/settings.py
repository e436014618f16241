"""The predictor's settings: which predictor it serves, and whether it records what it sees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dilaserve.settings import AT_LEAST_ONE, NOT_NEGATIVE, CommonSettings

__all__ = ["FOLDER_NAME", "PredictorSettings"]

FOLDER_NAME = "predictor"
"""Within a model's folder."""


class PredictorSettings(CommonSettings, frozen=True, kw_only=True):
    """Read from DILASERVE_* variables, once, in `__main__`."""

    model: Annotated[str, "folder of the model whose steps are predicted"]
    model_name: Annotated[str, "id of the model in the API; empty: the folder's name"] = ""
    predictor: Annotated[
        str,
        "folder of the trained step predictor; empty: `predictor` in the model's folder",
    ] = ""
    record_dir: Annotated[
        str, "folder to record the steps of served requests in, by one predictor; empty: none"
    ] = ""
    record_mb: Annotated[
        int, "megabytes of recorded steps to keep; the oldest go first", AT_LEAST_ONE
    ] = 256
    start_timeout_s: Annotated[
        float, "how long to wait for NATS and Redis at the start", NOT_NEGATIVE
    ] = 30.0

    @property
    def model_id(self) -> str:
        """What the scheduler calls the model."""
        return self.model_name or Path(self.model).resolve().name

    @property
    def folder(self) -> Path:
        """Of the trained predictor."""
        return Path(self.predictor) if self.predictor else Path(self.model) / FOLDER_NAME
