"""What `make bench` makes of its rounds; the rounds themselves are its own run's."""

from __future__ import annotations

import asyncio
import sys

import httpx
import msgspec
import pytest

from dilaserve_bench import throughput
from dilaserve_bench.throughput import N_OUTPUT, Load, Round


def test_ratios_are_taken_round_by_round() -> None:
    """The machine slows down by half from round to round; each ratio is to its own bare round."""
    rows = throughput._rows(
        {
            "": [Round(seconds=s, n_tokens=1000, n_passes=100) for s in (1.0, 2.0, 4.0)],
            "1": [Round(seconds=s, n_tokens=1000) for s in (1.25, 2.5, 5.0)],
            "block": [Round(seconds=s, n_tokens=1000) for s in (1.0, 2.5, 40.0)],
        }
    )
    assert [(row.mode, row.run_ahead) for row in rows] == [
        ("bare", ""),
        ("stack", "1"),
        ("stack", "block"),
    ]
    assert [row.ratio for row in rows] == pytest.approx([1.0, 0.8, 0.8])
    assert [row.tokens_per_s for row in rows] == pytest.approx([500.0, 400.0, 400.0])
    assert {row.step_ms for row in rows} == {20.0}


def test_a_stack_and_a_bare_loop_without_the_same_rounds_are_not_compared() -> None:
    one = Round(seconds=1.0, n_tokens=1, n_passes=1)
    with pytest.raises(ValueError, match="zip"):
        throughput._rows({"": [one], "1": [one, one]})


async def test_the_bare_loop_is_asked_by_a_line_and_answers_with_a_round() -> None:
    script = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    n, c = map(int, line.split())\n"
        '    print(f\'{{"seconds": {c}.5, "n_tokens": {n}, "n_passes": 3}}\', flush=True)\n'
        "    break\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    answer = await throughput._ask_bare(process, Load(n_requests=96, concurrency=16))
    assert answer == Round(seconds=16.5, n_tokens=96, n_passes=3)
    await process.wait()
    with pytest.raises(RuntimeError, match="the bare loop has ended"):
        await throughput._ask_bare(process, Load(1, 1))


async def test_a_client_goes_through_its_seeds_and_takes_no_cut_stream_for_whole() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(msgspec.json.decode(request.content))
        end = "data: [DONE]" if bodies[-1]["seed"] < 2 else 'data: {"choices": []}'
        return httpx.Response(200, text=f'data: {{"choices": []}}\n\n{end}\n\n')

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await throughput._follow(client, "tiny", iter([0, 1]))
        assert [body["seed"] for body in bodies] == [0, 1]
        assert {(body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(N_OUTPUT, True)}
        with pytest.raises(RuntimeError, match="the stream with seed 2 ended with"):
            await throughput._follow(client, "tiny", iter([2]))


def test_only_what_needs_a_look_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    throughput._print_warning("gateway", "INFO serving")
    throughput._print_warning("gateway", "WARNING full")
    throughput._print_warning("supervisor", "worker-1 was killed")
    assert capsys.readouterr().err == "gateway: WARNING full\nsupervisor: worker-1 was killed\n"
