"""The predictor in force: read from its folder, and read again when it was replaced.

A folder without a predictor is waited for, since one may be trained from the traffic that is being
served; one that cannot be used is an error at the start, and later leaves the former in force.
"""

from __future__ import annotations

from pathlib import Path

from dilaserve_predictor.model import FILE_NAME, Predictor, PredictorError, StepModel

__all__ = ["PredictorFolder"]

Version = tuple[int, int, int]


class PredictorFolder:
    """One folder, and the language model that its predictor has to be for."""

    def __init__(self, folder: Path, model_id: str) -> None:
        self.predictor: Predictor | None = None
        """None while there is none."""
        self._folder = folder
        self.model_id = model_id
        self._version: Version | None = None

    def absence(self) -> str:
        """What to say while there is none."""
        return (
            f"no step predictor in {self._folder}, so nothing is predicted for {self.model_id}; "
            f"record steps and `dilaserve train-predictor STEPS --out {self._folder}`, or set "
            "DILASERVE_PREDICTOR to its folder"
        )

    def refresh(self) -> bool:
        """Read the file if it is another than the last time; True if there is a new predictor.
        Raises PredictorError for one that cannot be used, once."""
        version = self._present()
        if version is None or version == self._version:
            return False
        self._version = version
        model = StepModel.load(self._folder)
        if model.info.model_id != self.model_id:
            raise PredictorError(
                f"the step predictor in {self._folder} is for the model "
                f"{model.info.model_id!r}, not for {self.model_id!r}; train one for it, or set "
                "DILASERVE_MODEL_NAME or DILASERVE_PREDICTOR"
            )
        self.predictor = Predictor(model)
        return True

    def _present(self) -> Version | None:
        try:
            found = (self._folder / FILE_NAME).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
