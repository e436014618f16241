"""Measures several points at a time, each in a process of its own. Knows no point."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from typing import TypeVar

__all__ = ["measure_all"]

K = TypeVar("K")
T = TypeVar("T")


def measure_all(
    measure: Callable[[K], T],
    keys: Iterable[K],
    *,
    n_jobs: int,
    is_stopped: Callable[[], bool],
) -> Iterator[tuple[K, T]]:
    """(key, value) in the order in which they are done. Once stopped, those under way are finished
    and no others begun. `measure` and keys travel by pickle."""
    todo = iter(keys)
    pending: dict[Future[T], K] = {}
    # Not forked: the parent has threads, which draw the progress.
    with ProcessPoolExecutor(
        n_jobs, mp_context=get_context("spawn"), initializer=_leave_interrupts_to_the_parent
    ) as pool:
        while True:
            room = 0 if is_stopped() else n_jobs - len(pending)
            pending.update({pool.submit(measure, key): key for key in islice(todo, room)})
            if not pending:
                return
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), future.result()


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
