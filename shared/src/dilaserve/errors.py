"""The tree of DiLaServe's errors, split by who can mend them.

    DiLaServeError
    ├── SettingsError        the operator: a setting is wrong (names variable, value, remedy)
    ├── ModelFolderError     the operator: a model folder cannot be loaded
    ├── InvalidRequestError  the client: a request cannot be served as it stands
    ├── UnavailableError     nobody's fault for long: wait and try again
    │   ├── BusUnavailableError
    │   │   ├── BusTimeoutError
    │   │   ├── NoRespondersError
    │   │   └── ResponderFailedError
    │   └── StoreUnavailableError
    └── LifecycleError       us: an event that the lifecycle table does not know

A message says what happened, with the value, and the remedy.
"""

from __future__ import annotations


class DiLaServeError(Exception):
    """The root of every error that DiLaServe raises on purpose."""


class SettingsError(DiLaServeError):
    """A setting is missing or malformed."""


class ModelFolderError(DiLaServeError):
    """A model folder lacks a file, or holds something that cannot be loaded."""


class InvalidRequestError(DiLaServeError):
    """A request that cannot be served as it stands; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnavailableError(DiLaServeError):
    """A part the caller depends on does not answer now; trying again later may succeed."""


class BusUnavailableError(UnavailableError):
    """The bus is not connected, so nothing was published."""


class BusTimeoutError(BusUnavailableError):
    """Nobody answered a request in time; it may or may not have been carried out."""


class NoRespondersError(BusUnavailableError):
    """Nobody listens on the subject."""


class ResponderFailedError(BusUnavailableError):
    """The one who should answer raised an error; its log has the trace."""


class StoreUnavailableError(UnavailableError):
    """The store does not answer; a write may or may not have been carried out."""


class LifecycleError(DiLaServeError):
    """An event reached a request in a state that does not allow it; nothing was changed."""
