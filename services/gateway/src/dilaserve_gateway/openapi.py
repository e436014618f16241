"""The bodies' schemas in /openapi.json: they are parsed by `intake`, so FastAPI knows none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Have the document say what is posted to each path; it is built when first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, bodies)
        return app.openapi_schema

    setattr(app, "openapi", document)  # noqa: B010 - FastAPI's way; mypy forbids the assignment


def _document(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies.values()], ref_template=_REFERENCE
    )
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas["$defs"])
    for path, body in bodies.items():
        reference = {"$ref": _REFERENCE.format(model=body.__name__)}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        }
    return document
