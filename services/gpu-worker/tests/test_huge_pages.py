"""Huge pages are asked for in the words of glibc, and nobody's own choice is overruled."""

from __future__ import annotations

import sys

import pytest

from dilaserve_gpu_worker.host import process
from dilaserve_gpu_worker.huge_pages import asks_for_huge_pages, with_huge_pages


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=3", "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.hugetlb=2:glibc.malloc.check=0",) * 2,
    ],
)
def test_what_is_asked_for(given: str | None, expected: str) -> None:
    environ = {"HOME": "/tmp"} | ({} if given is None else {"GLIBC_TUNABLES": given})
    asking = with_huge_pages(environ)
    assert asking == {"HOME": "/tmp", "GLIBC_TUNABLES": expected}
    assert with_huge_pages(asking) == asking
    assert asks_for_huge_pages(asking) == ("hugetlb=1" in expected)


async def test_the_engine_process_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    script = "import os; os.write(1, os.environ['GLIBC_TUNABLES'].encode())"
    monkeypatch.setattr(process, "COMMAND", [sys.executable, "-c", script])
    child = process._start()
    assert child.stdout is not None
    assert child.communicate(timeout=30)[0] == b"glibc.malloc.hugetlb=1"
