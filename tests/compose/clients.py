"""What clients do in these tests, and waiting."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from . import engine as docker

PROMPT = "3 + 4 ="
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"
"""A script: prints what is at a URL."""


def report(line: str) -> None:
    print(line, file=sys.stderr)


def timed(what: str, work: Callable[[], object]) -> None:
    start = time.monotonic()
    work()
    report(f"{what}: {time.monotonic() - start:.1f} s")


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.5)


def body(seed: int, **more: object) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 96,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        **more,
    }


LONG = {"max_tokens": 512, "min_confidence": 1.0}
"""One token a step: a stream that takes seconds, so that somebody can be killed meanwhile."""


def complete(client: httpx.Client, seed: int, **more: object) -> str:
    answer = client.post("/v1/completions", json=body(seed, **more))
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def stream(client: httpx.Client, seed: int, **more: object) -> str:
    """The text; raises for a stream that ends without a finish."""
    text, finish = "", None
    with client.stream("POST", "/v1/completions", json=body(seed, stream=True, **more)) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                finish = event["choices"][0]["finish_reason"] if event["choices"] else finish
    assert finish == "length", (seed, text, finish)
    return text


def instances(stack: docker.Project) -> list[Any]:
    status = json.loads(stack.inside("scheduler", "dilaserve", "status", "--json"))
    return [i for i in status["instances"] if i["state"] == "live"]
