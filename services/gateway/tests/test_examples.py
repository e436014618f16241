"""The examples run, and show what they say."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from dilaserve_gateway.testing import FakeFleet

EXAMPLES = Path(__file__).parents[3] / "examples"


async def run(url: str, *command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | {"DILASERVE_GATEWAY_URL": url, "NO_PROXY": "127.0.0.1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode() + stdout.decode()
    return stdout.decode()


async def test_openai_client(url: str, fleet: FakeFleet) -> None:
    output = await run(url, sys.executable, str(EXAMPLES / "openai_client.py"))
    assert output.count("hello world") == 6
    assert fleet.submits[-1].slo_ms == 2000
    assert "met: True, in 6 steps, threshold 0.9" in output


async def test_watch_denoising(url: str, fleet: FakeFleet) -> None:
    output = await run(url, sys.executable, str(EXAMPLES / "watch_denoising.py"), "hi")
    lines = output.splitlines()
    assert lines[0].startswith("   1 __ll____")
    assert lines[1].startswith("   2 hell____")
    assert lines[-1] == "     = hello world"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(url: str, fleet: FakeFleet) -> None:
    output = await run(url, "sh", str(EXAMPLES / "curl.sh"))
    assert '"id":"tiny"' in output
    assert '"content":"hello world"' in output
    assert "x-seed: 4242" in output.lower()
    assert "data: [DONE]" in output
    assert '"prompt_tokens"' in output
    assert '"threshold":0.9' in output
