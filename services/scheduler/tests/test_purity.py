"""The core and the policies are sans-IO, whatever they import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PACKAGES = ("dilaserve_scheduler.core", "dilaserve_scheduler.policies")
LOADED = ("asyncio", "socket", "nats", "redis", "valkey", "torch", "opentelemetry", "uvloop")
IMPORTED = (*LOADED, "time", "datetime", "random", "threading", "os", "logging", "secrets")
"""Some of these the interpreter loads by itself, so that only the source tells."""


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_with_io_is_loaded(package: str) -> None:
    script = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module({package!r})\n"
        "for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(result.stdout.split())
    assert f"{package}.{'core' if package.endswith('core') else 'infaas'}" in loaded
    assert loaded & set(LOADED) == set()


def test_no_source_that_is_reached_imports_io_time_or_chance() -> None:
    reached = modules_reached(PACKAGES)
    assert {"dilaserve.messages", "dilaserve.store.records", "dilaserve_scheduler.core.core"} <= (
        reached.keys()
    )
    offenders = {
        name: sorted(found)
        for name, path in reached.items()
        if (found := {module.partition(".")[0] for module in imports(path)} & set(IMPORTED))
    }
    assert offenders == {}


def modules_reached(packages: tuple[str, ...]) -> dict[str, Path]:
    """Our own modules that these packages import, directly or not."""
    waiting = [name for package in packages for name in members(importlib.import_module(package))]
    reached: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            prefix = ".".join(parts[:n])
            module = find(prefix)
            if prefix not in reached and module is not None:
                reached[prefix] = module
                waiting.extend(m for m in imports(module) if m.startswith("dilaserve"))
    return reached


def members(package: ModuleType) -> list[str]:
    found = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [package.__name__, *(f"{package.__name__}.{name}" for name in found)]


def find(name: str) -> Path | None:
    """The source of a module; None if the last part is not a module."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found
