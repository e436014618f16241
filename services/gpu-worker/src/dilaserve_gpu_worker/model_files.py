"""The files of a model folder: JSON, safetensors in one file or in shards, and their hash.

Imports no torch, so that a folder can be looked at before a worker starts. Knows no model: names
and shapes are asked for by the caller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from safetensors import SafetensorError, safe_open

from dilaserve.errors import ModelFolderError
from dilaserve.model_folder import LFS_REMEDY, is_lfs_pointer

__all__ = [
    "STORED_TYPES",
    "TensorFiles",
    "check_tensors",
    "read_json",
    "weight_files",
    "weights_hash",
]

STORED_TYPES = ("F32", "BF16", "F16", "F64")
"""Types that tensors may be stored in."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 1 << 16
_N_SAMPLES = 256


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
        _check_fetched(path)
        raise ModelFolderError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object; download it again")
    return value


class TensorFiles:
    """The safetensors of a folder, open: name → tensor; a context manager that closes the files.

    Opening reads each file's header and compares its size with it; no tensor is read. Raises
    ModelFolderError when a file is missing or damaged, or a tensor is there twice.
    """

    def __init__(self, folder: Path, framework: Literal["pt", "np"]) -> None:
        self.folder = folder
        self._framework = framework
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        for path in weight_files(folder):
            self._add(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._where)

    def has(self, name: str) -> bool:
        """Whether it holds the tensor `name`."""
        return name in self._where

    def stored_type(self, name: str) -> str:
        """As safetensors spell it, such as BF16."""
        return str(self._where[name].get_slice(name).get_dtype())

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises ModelFolderError for a tensor that is missing, (as a whole) of another shape, or
        of none of STORED_TYPES."""
        if not self.has(name):
            raise ModelFolderError(
                f"{self.folder} lacks the tensor {name}; "
                "its safetensors do not belong to its config.json: download both again"
            )
        found = list(self._where[name].get_slice(name).get_shape())
        if found != list(shape):
            raise ModelFolderError(
                f"{self.folder}: tensor {name} has shape {found}, config.json says "
                f"{list(shape)}; its safetensors do not belong to its config.json: "
                "download both again"
            )
        stored = self.stored_type(name)
        if stored not in STORED_TYPES:
            raise ModelFolderError(
                f"{self.folder}: tensor {name} is stored as {stored}; quantized weights are not "
                f"computed here: use a checkpoint in one of {', '.join(STORED_TYPES)}"
            )

    def check_ends_before(self, name: str) -> None:
        """Raises ModelFolderError where `name` is there, a tensor beyond the last layer: it would
        be left out silently."""
        if self.has(name):
            raise ModelFolderError(
                f"{self.folder} holds {name}, beyond the last layer of config.json; "
                "they do not belong together: download both again"
            )

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Any:
        """The tensor `name`, or a part of it, in the framework asked for."""
        return self._where[name].get_slice(name)[part or (slice(None),)]

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
            return self._stack.enter_context(safe_open(path, framework=self._framework))
        except (SafetensorError, OSError) as error:
            _check_fetched(path)
            raise ModelFolderError(
                f"{path} is no readable safetensors file ({error}); download it again"
            ) from error


def check_tensors(folder: Path, shapes: Mapping[str, Sequence[int]], beyond: str) -> None:
    """As far as the files' headers tell: whether they are whole, hold tensors of these names and
    shapes, and not the one `beyond` the last. Raises ModelFolderError."""
    with TensorFiles(folder, "np") as files:
        files.check_ends_before(beyond)
        for name, shape in shapes.items():
            files.check(name, shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted. Raises ModelFolderError when one is missing."""
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if not (folder / _INDEX).exists():
        raise _no_weights(folder)
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{folder / _INDEX} has no weight_map; download it again")
    for name in weight_map.values():
        _check_shard(folder, name)
    return [folder / name for name in sorted(set(weight_map.values()))]


def _no_weights(folder: Path) -> ModelFolderError:
    for name in (_SINGLE, _INDEX):
        _check_link(folder / name)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return ModelFolderError(
            f"{folder} has {shards[0]}{' and others' if shards[1:] else ''}, and no {_INDEX}, "
            "which says where each tensor is; download it from where the shards are from"
        )
    return ModelFolderError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}; "
        "download the model's safetensors into the folder"
    )


def _check_shard(folder: Path, name: object) -> None:
    """A shard stands beside its index, or links elsewhere as in Hugging Face's cache: a name with
    a path would have the hash, and the folder's copies, miss it."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ModelFolderError(
            f"{folder / _INDEX} names the shard {name!r}, which is no file of the folder; "
            "download it again"
        )
    if not (folder / name).is_file():
        _check_link(folder / name)
        raise ModelFolderError(f"{folder} lacks the shard {name}; download it again")


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise ModelFolderError(
            f"{path} is a link to {path.readlink()}, which does not exist; "
            "download it again, or copy the folder with what its links lead to"
        )


def _check_fetched(path: Path) -> None:
    """A file that could not be made sense of may never have been there."""
    if is_lfs_pointer(path):
        raise ModelFolderError(f"{path} is a pointer of Git LFS, and not the file; {LFS_REMEDY}")


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
