"""The files of a model folder: JSON, safetensors in one file or in shards, and their hash.

Knows no model: names and shapes are asked for by the caller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilaserve.errors import ModelFolderError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 1 << 16
_N_SAMPLES = 256
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float32,
}
"""Types that tensors may be stored in, and what they are computed in."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelFolderError when missing or malformed."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFolderError(
            f"{path} cannot be read ({error.strerror}); "
            "give the folder that holds config.json and model.safetensors"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object; download it again")
    return value


class Checkpoint:
    """Named tensors of a folder, memory-mapped; a context manager that closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        for path in weight_files(folder):
            self._add(path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """Type to compute the stored tensors in, fp32 where theirs differ."""
        stored = {file.get_slice(name).get_dtype() for name, file in self._where.items()}
        return _DTYPES.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32

    def tensor(self, name: str, shape: Sequence[int], part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor `name` on the CPU, as stored, or a part of it; nothing else is read. Raises
        ModelFolderError when it is missing or (as a whole) of another shape."""
        if name not in self._where:
            raise ModelFolderError(
                f"{self.folder} lacks the tensor {name}; "
                "its safetensors do not belong to its config.json: download both again"
            )
        found = self._where[name].get_slice(name).get_shape()
        if list(found) != list(shape):
            raise ModelFolderError(
                f"{self.folder}: tensor {name} has shape {list(found)}, config.json says "
                f"{list(shape)}; its safetensors do not belong to its config.json: "
                "download both again"
            )
        self._check_type(name)
        tensor: Tensor = self._where[name].get_slice(name)[part or (slice(None),)]
        return tensor

    def has(self, name: str) -> bool:
        """Whether it holds the tensor `name`."""
        return name in self._where

    def _check_type(self, name: str) -> None:
        stored = self._where[name].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ModelFolderError(
                f"{self.folder}: tensor {name} is stored as {stored}; quantized weights are not "
                f"computed here: use a checkpoint in one of {', '.join(_DTYPES)}"
            )

    def _add(self, path: Path) -> None:
        file = self._open(path)
        twice = sorted(self._where.keys() & file.keys())
        if twice:
            raise ModelFolderError(
                f"{self.folder} holds the tensor {twice[0]} in {path.name} and in a shard before "
                "it, so its shards do not belong together: download them again"
            )
        self._where |= dict.fromkeys(file.keys(), file)

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(
                f"{path} is no readable safetensors file ({error}); download it again"
            ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted. Raises ModelFolderError when one is missing."""
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if not (folder / _INDEX).exists():
        raise ModelFolderError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; "
            "download the model's safetensors into the folder"
        )
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{folder / _INDEX} has no weight_map; download it again")
    for name in weight_map.values():
        _check_shard(folder, name)
    return [folder / name for name in sorted(set(weight_map.values()))]


def _check_shard(folder: Path, name: object) -> None:
    """A shard stands beside its index, or links elsewhere as in Hugging Face's cache: a name with
    a path would have the hash, and the folder's copies, miss it."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelFolderError(
            f"{folder / _INDEX} names the shard {name!r}, which is no file of the folder; "
            "download it again"
        )
    if not (folder / name).is_file():
        raise ModelFolderError(f"{folder} lacks the shard {name}; download it again")


def weights_hash(folder: Path) -> str:
    """Sixteen hex digits that tell models apart: config.json and the safetensors' contents.

    Reads a file up to 16 MiB whole, of a larger one 256 evenly spaced samples of 64 KiB, its
    header among them: 16 GB take less than a second. Raises ModelFolderError as loading does.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps(read_json(folder / "config.json"), sort_keys=True).encode())
    for path in weight_files(folder):
        _hash_samples(digest, path)
    return digest.hexdigest()


def _hash_samples(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    stride = max(_SAMPLE_BYTES, -(-size // _N_SAMPLES))
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        for offset in range(0, size, stride):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
