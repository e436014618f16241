"""The official client works, streaming and not, sync and async, over real HTTP."""

from __future__ import annotations
