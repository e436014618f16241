"""docs/api.md names every endpoint and every field."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from dilaserve_gateway.schema import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DenoiseBody,
    LevelHeaders,
)

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_endpoint(app: FastAPI) -> None:
    paths = [path.replace(":path", "") for path in app.openapi()["paths"]]
    assert len(paths) >= 9
    assert [path for path in paths if f" {path}`" not in PAGE] == []


def test_every_field() -> None:
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields, *DenoiseBody.model_fields}
    assert [name for name in fields | set(UNSUPPORTED) if f"`{name}`" not in PAGE] == []
    headers = [str(field.alias) for field in LevelHeaders.model_fields.values()]
    assert [name for name in headers if f"`{name}`" not in PAGE.lower()] == []
