"""From bytes to a checked body: size limit, JSON, schema, unsupported fields, and clear errors.

Unknown fields are ignored, as OpenAI-compatible servers do; their names are handed on, so that
the answer can say which (header `X-Ignored-Fields`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from dilaserve_gateway.errors import ApiError, body_too_large, invalid, shown
from dilaserve_gateway.schema import UNSUPPORTED, GenerationBody, LevelHeaders, Message

B = TypeVar("B", bound=GenerationBody)

MAX_IGNORED_NAMES = 10


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 above `limit` bytes, without reading on."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise body_too_large(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise body_too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def parse_body(data: bytes, kind: type[B]) -> B:
    """The checked body. Raises ApiError 400 that names the field, the value and the remedy."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error, kind) from None
    _check_unsupported(body.model_extra or {})
    return body


def ignored_fields(body: GenerationBody) -> tuple[str, ...]:
    """Names of unknown fields, those that fit a header."""
    names = [n for n in body.model_extra or {} if n not in UNSUPPORTED]
    return tuple(n for n in names if re.fullmatch(r"[\w.-]{1,64}", n, re.ASCII))[:MAX_IGNORED_NAMES]


def parse_level_headers(headers: Mapping[str, str]) -> LevelHeaders:
    """X-SLO-Ms, X-Priority, X-Service-Tier and X-Min-Confidence. Raises ApiError 400."""
    try:
        return LevelHeaders.model_validate(dict(headers))
    except ValidationError as error:
        raise _explain(error, LevelHeaders) from None


def _check_unsupported(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        harmless, remedy = UNSUPPORTED.get(name, ((value,), ""))
        if not any(_is_same(value, one) for one in harmless):
            raise invalid(
                f"`{name}`={shown(value)} is not supported; {remedy}.",
                param=name,
                code="unsupported_parameter",
            )


def _is_same(value: Any, other: Any) -> bool:
    """Equal, where False is not 0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _explain(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return invalid(
            f"The body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}; "
            "send a JSON object in UTF-8."
        )
    path = _field_path(first["loc"], kind)
    if not path:
        return invalid(f"The body is {shown(first['input'])}; send a JSON object.")
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    remedy = _description(path, kind)
    return invalid(f"{_complaint(first, param, path)}; give {remedy}.", param=param)


def _complaint(details: ErrorDetails, param: str, path: tuple[int | str, ...]) -> str:
    if details["type"] == "missing" and len(path) == len(details["loc"]):
        return f"`{param}` is missing"
    value = shown(details["input"])
    if len(path) < len(details["loc"]):  # one of several forms: pydantic speaks of just one
        return f"`{param}` ({value}) is not valid"
    message = re.sub("^Input", "it", details["msg"])
    return f"`{param}` ({value}) is not valid: {message[:1].lower()}{message[1:]}"


def _field_path(loc: tuple[int | str, ...], kind: type[BaseModel]) -> tuple[int | str, ...]:
    """The part of a location that the client knows: fields and indices, no names of types."""
    path: list[int | str] = []
    for step in loc:
        if isinstance(step, str) and step not in _known_names(kind):
            break
        path.append(step)
    while path and path[-1] == 0 and len(path) < len(loc):
        path.pop()
    return tuple(path)


def _known_names(kind: type[BaseModel]) -> set[str]:
    own = {field.alias or name for name, field in kind.model_fields.items()}
    return own | set(Message.model_fields) | {"include_usage", "text", "type"}


def _description(path: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    """What to give for the innermost field of the path that says so."""
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    fields = dict(Message.model_fields) | fields if path[0] == "messages" else fields
    names = [step for step in path if isinstance(step, str) and step in fields]
    return fields[names[-1]].description or "a value of its type"
