"""Where the model is, and whether its folder looks complete. Reads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import dilaserve
from dilaserve.addresses import CliSettings
from dilaserve.errors import ModelFolderError
from dilaserve.settings import load

__all__ = ["LFS_REMEDY", "find_model", "is_lfs_pointer", "missing_parts"]

BUNDLED = Path("models", "tiny")
TOKENIZERS = {
    "tokenizer.json": ("tokenizer.json",),
    "vocab.json with merges.txt": ("vocab.json", "merges.txt"),
}
"""Files that make a tokenizer: the whole of it, or byte pairs as in Dream's and Qwen2's folders."""
READ = (".json", ".safetensors", ".txt")
"""How the names of files end that a service may read."""
LFS_REMEDY = "run `git lfs pull` in the folder that was cloned"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
SOURCE_CHECKOUT = Path(dilaserve.__file__).resolve().parents[3]


def find_model(option: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder given, else that of DILASERVE_MODEL, else the bundled model.
    Raises ModelFolderError for a folder that lacks a part."""
    folder = option or _from_environ(environ) or _bundled()
    missing = missing_parts(folder)
    if missing:
        raise ModelFolderError(
            f"model folder {folder}: {'; '.join(missing)}; "
            "give a folder in Hugging Face's layout by --model or DILASERVE_MODEL"
        )
    return folder.resolve()


def missing_parts(folder: Path) -> list[str]:
    """What a model folder lacks, in words; empty when it looks complete."""
    if not folder.is_dir():
        return ["it is no folder, but a file" if folder.exists() else "it does not exist"]
    dangling = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in READ and path.is_symlink() and not path.exists()
    )
    if dangling:
        return [f"{', '.join(dangling)}: links to what does not exist"]
    return [
        *_config_faults(folder / "config.json"),
        *([] if any(folder.glob("*.safetensors")) else ["no *.safetensors"]),
        *([] if _has_tokenizer(folder) else [f"no {' or '.join(TOKENIZERS)}"]),
    ]


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what Git leaves in its place where Git LFS is not installed."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False


def _has_tokenizer(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in names) for names in TOKENIZERS.values())


def _from_environ(environ: Mapping[str, str]) -> Path | None:
    text = load(CliSettings, environ).model
    return Path(text) if text else None


def _bundled() -> Path:
    places = [BUNDLED, SOURCE_CHECKOUT / BUNDLED]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ModelFolderError(
            f"no model: {' and '.join(map(str, places))} do not exist; "
            "give a folder by --model or DILASERVE_MODEL"
        )
    return found


def _config_faults(path: Path) -> list[str]:
    if not path.is_file():
        return ["no config.json"]
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if is_lfs_pointer(path):
            return [f"config.json is a pointer of Git LFS, and not the file: {LFS_REMEDY}"]
        return [f"config.json is not JSON ({error})"]
    if not isinstance(config, dict):
        return ["config.json holds no JSON object"]
    return [] if "mask_token_id" in config else ["config.json has no mask_token_id"]
