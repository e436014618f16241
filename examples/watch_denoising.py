"""Watches a canvas being denoised: prints it after each step, `_` where still masked.

`python examples/watch_denoising.py "Running total of 3 5 2 7"`; needs httpx.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import json
import os
import sys

import httpx

URL = os.environ.get("DILASERVE_GATEWAY_URL", "http://127.0.0.1:8000")


def main() -> None:
    """Stream /v1/denoise."""
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Running total of 3 5 2 7 1 8 6 4"
    with httpx.Client(base_url=URL, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        with client.stream("POST", "/v1/denoise", json=body) as response:
            canvas: list[str] = []
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    sys.exit(event["error"]["message"])
                if event["object"] == "denoise.start":
                    canvas = ["_"] * event["n_output"]
                elif event["object"] == "denoise.step":
                    for position, text in zip(event["positions"], event["texts"], strict=True):
                        canvas[position] = text
                    print(f"{event['step']:4}", "".join(canvas))
                else:
                    print("     =", event["text"])


if __name__ == "__main__":
    main()
