"""Prints what distributions need that is not ours: `requirements.py FOLDER...`, for image layers
that an edit of our sources leaves as they are."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def needed(folders: list[Path]) -> list[str]:
    """Requirements as their pyproject.toml files have them, each once."""
    found: dict[str, None] = {}
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        found |= dict.fromkeys(project["dependencies"])
    return [requirement for requirement in found if not requirement.startswith("dilaserve")]


if __name__ == "__main__":
    sys.stdout.write("\n".join(needed([Path(folder) for folder in sys.argv[1:]])) + "\n")
