"""The errors that a client sees, in OpenAI's shape, each with a remedy. Knows no request."""

from __future__ import annotations

import math
from typing import Any

from dilaserve.errors import DiLaServeError, InvalidRequestError, UnavailableError

UNAVAILABLE_RETRY_S = 2.0


class ApiError(DiLaServeError):
    """An answer other than 200: `message` says what happened, the value, and the remedy."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """`{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, at least 1, where trying again may succeed."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it stands."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(asked: str, served: str) -> ApiError:
    """404 that lists what is served."""
    return ApiError(
        404,
        f"The model {shown(asked)} is not served here; use {served!r} (see /v1/models).",
        param="model",
        code="model_not_found",
    )


def request_not_found(request_id: str) -> ApiError:
    """404 for a record that never was, or has expired."""
    return ApiError(
        404,
        f"No request {shown(request_id)} is stored; records expire a while after their end. "
        "Use the X-Request-Id of an answer.",
        param="request_id",
        code="request_not_found",
    )


def body_too_large(limit: int) -> ApiError:
    """413."""
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes; send a shorter prompt.",
        code="body_too_large",
    )


def overloaded(reason: str, retry_after_s: float) -> ApiError:
    """429: the cluster is full, and will have room again."""
    return ApiError(
        429,
        f"The cluster is overloaded: {reason}. Try again after {retry_after_s:.0f} s.",
        kind="rate_limit_error",
        code="overloaded",
        retry_after_s=retry_after_s,
    )


def unavailable(reason: str, retry_after_s: float = UNAVAILABLE_RETRY_S) -> ApiError:
    """503: a part that is needed does not answer now."""
    return ApiError(
        503,
        f"The request cannot be served now: {reason}. Try again after {retry_after_s:.0f} s.",
        kind="server_error",
        code="unavailable",
        retry_after_s=retry_after_s,
    )


def request_failed(request_id: str, reason: str, *, code: str = "request_failed") -> ApiError:
    """500: the request was admitted and could not be finished."""
    return ApiError(
        500,
        f"Request {request_id} ended without an answer: {reason}. "
        f"Its course is at /v1/requests/{request_id}; sending it again is safe.",
        kind="server_error",
        code=code,
    )


def internal_error() -> ApiError:
    """500 for what should never happen; the log has the traceback."""
    return ApiError(
        500,
        "The gateway met an error of its own; the gateway's log says more. Try again.",
        kind="server_error",
        code="internal_error",
    )


def from_error(error: DiLaServeError) -> ApiError:
    """What the client sees of an error that a collaborator raised."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return invalid(str(error), param=error.param)
        case UnavailableError():
            return unavailable(str(error))
        case _:
            return internal_error()


def shown(value: object, limit: int = 80) -> str:
    """`repr(value)` cut to `limit` characters; safe for integers of any size."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
