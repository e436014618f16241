"""Secrets in URLs are hidden."""

from __future__ import annotations

import pytest

from dilaserve.urls import without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:s3cret@host:6379/0", "redis://***@host:6379/0"),
        ("nats://u:p@a:1,nats://u:q@b:2", "nats://***@a:1,nats://***@b:2"),
        ("", ""),
    ],
)
def test_secrets_are_hidden(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
