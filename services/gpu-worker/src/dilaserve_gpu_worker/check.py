"""`python -m dilaserve_gpu_worker.check`: whether a worker would start, as far as that can be told
without torch. See dilaserve.checks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dilaserve.checks import Checked, answer
from dilaserve.crashpoints import CrashPoints
from dilaserve.settings import load
from dilaserve_gpu_worker.layout import beyond_last, tensor_shapes
from dilaserve_gpu_worker.model_config import read_config, shard_config
from dilaserve_gpu_worker.model_files import check_tensors, weight_files
from dilaserve_gpu_worker.settings import WorkerSettings

__all__ = ["check_start"]

MB = 1e6


def main() -> None:
    """Exit code 0 with what there is, 3 with what is wrong."""
    answer(lambda: check_start(os.environ))


def check_start(environ: Mapping[str, str]) -> Checked:
    """The settings, config.json, and what the safetensors' headers say. Raises
    SettingsError, ModelFolderError."""
    settings = load(WorkerSettings, environ)
    CrashPoints(settings.crash_at)
    folder = Path(settings.model)
    config = read_config(folder)
    shard_config(config, settings.tp_degree)
    shapes = tensor_shapes(config)
    check_tensors(folder, shapes, beyond_last(config))
    files = weight_files(folder)
    size = sum(path.stat().st_size for path in files)
    return Checked(
        detail=f"{config.model_type} of {config.n_layers} layers, {len(shapes)} tensors in "
        f"{len(files)} file{'s' * (len(files) > 1)} of {size / MB:,.0f} MB; not checked: the "
        "tensors' values, and whether the memory holds them"
    )


if __name__ == "__main__":
    main()
