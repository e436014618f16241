"""Decisions of the scheduler, sans-IO. Knows no bus, no store, no clock."""

from dilaserve_scheduler.core.core import Core
from dilaserve_scheduler.core.settings import CoreSettings

__all__ = ["Core", "CoreSettings"]
