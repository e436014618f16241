"""The import rules of the house, as import-linter contracts in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_IO = ("nats", "redis", "torch", "httpx")


def test_contracts_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_contracts_see_the_packages_that_they_forbid() -> None:
    graph = grimp.build_graph(
        "dilaserve", "dilaserve_gpu_worker", include_external_packages=True, cache_dir=None
    )
    assert "torch" in graph.modules
    assert graph.find_shortest_chain("dilaserve.bus.nats", "nats") is not None
    assert graph.find_shortest_chain("dilaserve.embedded", "asyncio") is not None


@pytest.mark.parametrize("package", ["dilaserve_scheduler.core", "dilaserve_scheduler.policies"])
def test_decisions_load_without_io(package: str) -> None:
    """The graph ends at other people's packages; this looks at what is really loaded."""
    script = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({package!r})\n"
        "for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        f"print(*sorted(set({WITHOUT_IO!r}) & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
