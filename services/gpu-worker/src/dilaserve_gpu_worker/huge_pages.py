"""Huge pages for processes that compute: glibc's malloc (2.35 or later) asks the kernel for them if
it is told so before the process starts. A pass touches some 30 MB, thousands of small pages.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["asks_for_huge_pages", "with_huge_pages"]

TUNABLES, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that asks for them; unchanged where it says whether to."""
    tunables = [each for each in environ.get(TUNABLES, "").split(":") if each]
    if not any(each.startswith(f"{TUNABLE}=") for each in tunables):
        tunables.append(f"{TUNABLE}=1")
    return {**environ, TUNABLES: ":".join(tunables)}


def asks_for_huge_pages(environ: Mapping[str, str]) -> bool:
    """Whether a process with that environment does."""
    return f"{TUNABLE}=1" in environ.get(TUNABLES, "").split(":")
