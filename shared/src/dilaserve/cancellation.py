"""Keeps a task's cancellation from being lost in libraries. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_cancellation"]


@contextmanager
def kept_cancellation() -> Iterator[None]:
    """Raise CancelledError at the end if the current task was cancelled within, whatever the body
    made of it. Before Python 3.12 `asyncio.wait_for`, which redis and nats-py use, returns its
    result, and forgets the cancellation, when both come in the same moment."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
