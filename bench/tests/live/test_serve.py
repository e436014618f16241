"""`dilaserve bench serve`: what is sent, what is counted, what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from dilaserve_bench.command import bench
from dilaserve_bench.live.load import Answer, Level
from dilaserve_bench.live.prompts import PromptsError, read_messages, sums
from dilaserve_bench.live.serve import Percentiles, row_of

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,100,40
2023-11-16 18:00:02.0000000,100,500
2023-11-16 18:00:03.0000000,100,5
"""


def answer(number: int, latency_s: float, outcome: Any = "done", **fields: Any) -> Answer:
    return Answer(
        request_id=f"r{number}",
        due_at=float(number),
        sent_at=number + 0.002,
        ended_at=number + latency_s,
        outcome=outcome,
        **fields,
    )


def test_a_row_counts_all_and_times_those_that_were_served() -> None:
    answers = [
        answer(0, 1.0, first_at=0.5, n_tokens=30, level=Level(n_steps=10, mean_threshold=0.9)),
        answer(1, 3.0, first_at=2.0, n_tokens=10, level=Level(n_steps=30, mean_threshold=0.5)),
        answer(2, 0.1, "refused"),
        answer(3, 0.2, "failed"),
        answer(4, 2.0, first_at=4.5, n_tokens=20, level=Level(slo_met=True, migrations=2)),
    ]
    row = row_of(answers, load="poisson", slo_s=2.5)
    assert (row.n, row.n_done, row.n_refused, row.n_failed) == (5, 3, 1, 1)
    assert (row.rate, row.seconds) == (1.0, 6.0)
    assert (row.requests_per_s, row.tokens_per_s) == (0.5, 10.0)
    assert row.latency_s == Percentiles(p50=2.0, p90=pytest.approx(2.8), p99=pytest.approx(2.98))
    assert row.first_text_s.p50 == 0.5
    assert row.attainment == 2 / 5
    assert row_of(answers, load="poisson", slo_s=None).attainment == 1 / 5
    assert row.mean_threshold == pytest.approx(0.6)
    assert row.migrations == 2
    assert row.late_ms == pytest.approx(2.0)


def test_a_row_of_nothing_served_has_no_latency() -> None:
    row = row_of([answer(0, 1.0, "failed"), answer(1, 1.0, "refused")], load="x", slo_s=1.0)
    assert (row.attainment, row.latency_s.p50, row.mean_threshold) == (0.0, None, None)


class Gateway:
    """Answers every chat in one piece, and keeps the bodies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.fault: str | None = None
        real = httpx.AsyncClient

        def client(*, base_url: str, **_: object) -> httpx.AsyncClient:
            assert base_url == "http://gateway"
            return real(base_url=base_url, transport=httpx.MockTransport(self._answer))

        monkeypatch.setattr(httpx, "AsyncClient", client)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m1"}, {"id": "m2"}]})
        assert request.url.path == "/v1/chat/completions"
        self.bodies.append(json.loads(request.content))
        if self.fault is not None:
            return httpx.Response(400, json={"error": {"message": self.fault}})
        level = {"slo_met": True, "mean_threshold": 0.8, "n_steps": 4, "migrations": 0}
        choices = [{"message": {"content": "x"}}]
        usage = {"completion_tokens": 7}
        return httpx.Response(200, json={"choices": choices, "usage": usage, "dilaserve": level})


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    return Gateway(monkeypatch)


def run(*options: str) -> Any:
    result = CliRunner().invoke(bench, ["serve", "--url", "http://gateway", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_row_for_each_rate_and_a_plot(gateway: Gateway, tmp_path: Path) -> None:
    plot = tmp_path / "serve.svg"
    found = run("--rate", "200,400", "--requests", "5", "--slo", "1.5", "--plot", str(plot))
    assert [(row["load"], row["n"], row["n_done"]) for row in found["rows"]] == [
        ("poisson", 5, 5), ("poisson", 5, 5)
    ]  # fmt: skip
    assert {"rate", "tokens_per_s", "first_text_s", "latency_s", "attainment"} < set(
        found["rows"][0]
    )
    assert found["rows"][0]["attainment"] == 1.0
    assert found["rows"][0]["mean_threshold"] == pytest.approx(0.8)
    assert "<svg" in plot.read_text()
    body = gateway.bodies[0]
    assert (body["model"], body["slo_ms"], body["max_tokens"]) == ("m1", 1500, 96)
    assert body["stream"] is True
    assert len({json.dumps(each["messages"]) for each in gateway.bodies}) == 5


def test_a_trace_gives_times_and_outputs(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "prompts.jsonl").write_text('{"question": "why?"}\n{"turns": ["how?", "so?"]}\n')
    found = run(
        "--trace", str(tmp_path / "azure.csv"), "--speed", "50", "--output", "256",
        "--prompts", str(tmp_path / "prompts.jsonl"), "--model", "m2",
    )  # fmt: skip
    [row] = found["rows"]
    assert (row["load"], row["n_done"]) == ("azure.csv", 3)
    assert row["rate"] == pytest.approx(50 * 2 / 3)
    assert [each["max_tokens"] for each in gateway.bodies] == [64, 256, 32]
    assert {each["messages"][0]["content"] for each in gateway.bodies} == {"why?", "how?"}
    assert {each["model"] for each in gateway.bodies} == {"m2"}
    assert not any("slo_ms" in each for each in gateway.bodies)


def test_where_nothing_is_served_it_says_why(gateway: Gateway) -> None:
    gateway.fault = "the canvas is too long"
    options = ["serve", "--url", "http://gateway", "--rate", "400", "--requests", "3"]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 1
    assert "0 refused and 3 failed, the first with: " in result.stderr
    assert "the canvas is too long" in result.stderr
    assert json.loads(CliRunner().invoke(bench, [*options, "--json"]).stdout)["rows"]


@pytest.mark.parametrize(
    ("plot", "word"), [("nowhere/page.svg", "no folder nowhere"), ("page.gif", ".svg")]
)
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_load(
    gateway: Gateway, plot: str, word: str
) -> None:
    result = CliRunner().invoke(bench, ["serve", "--url", "http://gateway", "--plot", plot])
    assert word in str(result.exception)
    assert gateway.bodies == []


def test_rates_are_above_0() -> None:
    result = CliRunner().invoke(bench, ["serve", "--url", "http://gateway", "--rate", "2,0"])
    assert result.exit_code == 2
    assert "--rate" in result.output


def test_sums_are_those_of_their_seed() -> None:
    assert sums(3, seed=1) == sums(3, seed=1)
    assert sums(3, seed=1) != sums(3, seed=2)


@pytest.mark.parametrize(
    ("text", "message"), [("", "is empty"), ('{"x": 1}', "line 1 has none"), ("{", "line 1: ")]
)
def test_a_bad_file_of_prompts_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(PromptsError, match=message):
        read_messages(path)
    with pytest.raises(PromptsError, match="cannot be read"):
        read_messages(tmp_path / "absent.jsonl")
