"""The gateway by OpenAI's client: an answer in one piece, a stream, several choices, extensions.

`pip install openai`, start a stack (`make up`), then `python examples/openai_client.py`.
"""

# ruff: noqa: T201 - an example prints

from __future__ import annotations

import os

from openai import OpenAI

URL = os.environ.get("DILASERVE_GATEWAY_URL", "http://127.0.0.1:8000")
QUESTION = "Running total of 3 5 2 7 1 8 6 4"


def main() -> None:
    """Ask the first model that is served."""
    client = OpenAI(base_url=f"{URL}/v1", api_key="not needed")
    model = next(iter(client.models.list())).id
    messages = [{"role": "user", "content": QUESTION}]

    answer = client.chat.completions.create(model=model, messages=messages)
    print("one piece:", answer.choices[0].message.content)
    print("usage:", answer.usage.total_tokens, "tokens; request", answer.id)

    print("stream:", end=" ")
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    sampled = client.chat.completions.create(
        model=model, messages=messages, n=3, temperature=1.0, seed=7, logprobs=True
    )
    for choice in sampled.choices:
        first = choice.logprobs.content[0]
        print(f"choice {choice.index}: {choice.message.content}  (first token {first.logprob:.3f})")

    urgent = client.chat.completions.create(
        model=model,
        messages=messages,
        extra_body={"slo_ms": 2000, "priority": 5, "min_confidence": 0.8},
    )
    print("with an SLO:", urgent.choices[0].message.content)
    used = urgent.model_extra["dilaserve"]
    print(f"met: {used['slo_met']}, in {used['n_steps']} steps, threshold {used['mean_threshold']}")


if __name__ == "__main__":
    main()
