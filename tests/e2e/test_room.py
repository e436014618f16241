"""A worker with a small KV pool: what can never fit is refused with the limit's name, what does not
fit now waits, and nothing crashes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from dilaserve.embedded import free_port
from dilaserve.settings import variable
from dilaserve.supervisor.plan import StackOptions
from dilaserve.supervisor.stack import running_stack

pytestmark = pytest.mark.timeout(180)

MODEL = Path(__file__).parents[2] / "models/tiny"
N_KV_TOKENS = 256
BODY = {"model": "tiny", "prompt": "Running total of 3 1 4", "ignore_eos": True}


def print_line(name: str, line: str) -> None:
    print(f"{name}: {line}")


async def test_what_fits_waits_and_what_never_fits_is_refused(tmp_path: Path) -> None:
    options = StackOptions(home=tmp_path, model=MODEL, port=free_port(), n_workers=1)
    environ = {**os.environ, variable("kv_tokens"): str(N_KV_TOKENS)}
    async with running_stack(options, environ=environ, log=print_line) as stack:
        url = stack.endpoints.gateway_url
        async with httpx.AsyncClient(base_url=url, timeout=90, trust_env=False) as http:
            refused, *served = await asyncio.gather(
                complete(http, max_tokens=2 * N_KV_TOKENS),
                *(complete(http, max_tokens=160) for _ in range(5)),
            )
            later = await complete(http, max_tokens=64)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"takes {N_KV_TOKENS} (its KV pool, DILASERVE_KV_TOKENS)" in error["message"]
    for answer in (*served, later):  # one at a time: two do not fit beside each other
        assert answer.status_code == 200, answer.text
    assert {a.json()["usage"]["completion_tokens"] for a in served} == {160}


async def complete(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json=BODY | fields)
