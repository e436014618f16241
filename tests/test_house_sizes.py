"""The size report: what is long has to argue its case in size_exceptions.toml."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
SOURCES = ("shared/src", "services/*/src", "bench/src", "docs")


def test_long_files_and_functions_are_argued_for() -> None:
    exceptions = tomllib.loads(Path(__file__).with_name("size_exceptions.toml").read_text())
    long = {**long_files(), **long_functions()}
    unexplained = {name: lines for name, lines in long.items() if name not in exceptions}
    assert unexplained == {}, "split them, or say why not in tests/size_exceptions.toml"
    stale = set(exceptions) - set(long)
    assert stale == set(), "no longer long: remove them from tests/size_exceptions.toml"
    assert all(exceptions.values()), "an exception needs a reason"


def test_report_sees_a_long_function() -> None:
    body = "\n".join(["def f():", "    class A:", "        def g(self):"] + ["            1"] * 50)
    assert dict(functions(ast.parse(body))) == {"f": 53, "A.g": 51}


def long_files() -> dict[str, int]:
    """Path → lines."""
    lines = {name(path): len(path.read_text().splitlines()) for path in source_files()}
    return {path: n for path, n in lines.items() if n > MAX_FILE_LINES}


def long_functions() -> dict[str, int]:
    """`path::function` → lines."""
    return {
        f"{name(path)}::{function}": n_lines
        for path in source_files()
        for function, n_lines in functions(ast.parse(path.read_text()))
        if n_lines > MAX_FUNCTION_LINES
    }


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Every function with its class's name, and its length in lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield prefix + node.name, node.end_lineno - node.lineno + 1
        inner = f"{node.name}." if isinstance(node, ast.ClassDef) else prefix
        yield from functions(node, inner)


def source_files() -> list[Path]:
    """All Python files that are not tests."""
    found = [path for pattern in SOURCES for path in ROOT.glob(f"{pattern}/**/*.py")]
    assert found
    return sorted(found)


def name(path: Path) -> str:
    """As it is called in the exceptions."""
    return path.relative_to(ROOT).as_posix()
