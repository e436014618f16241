"""The documents agree with the code."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])


@pytest.fixture(scope="module")
def built() -> dict[Path, str]:
    """What `make docs` would write."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        namespace: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "build.py"))
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return {Path(path): text for path, text in namespace["build"]().items()}


@pytest.mark.parametrize("name", ["reference.md", "lifecycle.md", "experiments.md"])
def test_generated_document_is_current(built: dict[Path, str], name: str) -> None:
    path = ROOT / "docs" / name
    assert path.read_text() == built[path], "run `make docs`"


def test_tree_of_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme.partition("## What is where")[2].split("```")[1]
    paths = re.findall(r"^(\S+) ", tree, re.MULTILINE)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []
