from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from dilaserve.errors import DiLaServeError, InvalidRequestError, ModelFolderError
from dilaserve.messages import CacheMode
from dilaserve.store.records import DecodingSpec
from dilaserve.store.redis import connect_redis
from dilaserve.testing import admitted, step_of
from dilaserve_gpu_worker.cli import denoise, replay
from dilaserve_gpu_worker.engine.alone import denoise_alone, engine_for_one, fresh_request
from dilaserve_gpu_worker.engine.types import Credit, NeverFitsError, StepOutput
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.weights import load_model

MakeFolder = Callable[..., Path]
PROMPT = [7, 8, 9]


def invoke(command: Callable[..., None], *arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def denoise_json(*arguments: object) -> dict[str, Any]:
    result = invoke(denoise, *arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


# --- denoise -------------------------------------------------------------------------------------


def test_denoise_is_the_golden_case(golden_folder: Path) -> None:
    cases = json.loads((golden_folder / "golden.json").read_text())["cases"]
    for case in cases[::7]:
        decide = ["--quota", 1] if case["threshold"] is None else ["--threshold", case["threshold"]]
        answer = denoise_json(
            "--model", golden_folder,
            "--prompt-ids", ",".join(map(str, case["prompt"])),
            "--output-len", case["gen_length"],
            "--block", case["block_length"],
            "--cache", case["mode"],
            *decide,
        )  # fmt: skip
        assert set(answer) == {"sequence", "nfe", "windows"}
        assert answer["sequence"] == case["sequence"]
        assert answer["nfe"] == len(answer["windows"])
        assert answer["windows"][0] == case["calls"][0]["ids"]


def test_denoise_ignores_eos_unless_told(make_folder: MakeFolder) -> None:
    folder = make_folder()
    options = ["--model", folder, "--prompt-ids", "7,8,9", "--output-len", 24, "--block", 8]
    output = denoise_json(*options)["sequence"][3:]
    assert 60 not in output
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": output[1]}))
    assert denoise_json(*options)["sequence"][3:] == output
    stopped = denoise_json(*options, "--stop-at-eos")["sequence"][3:]
    first_mask = stopped.index(60)
    assert output[1] in stopped[:first_mask]
    assert len(stopped) == 24


def test_denoise_finds_the_model_as_the_other_commands_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILASERVE_MODEL", str(tmp_path))
    result = invoke(denoise, "--prompt-ids", "7", "--output-len", 8)
    assert isinstance(result.exception, ModelFolderError)
    assert f"model folder {tmp_path}: no config.json" in str(result.exception)


def test_denoise_for_people(make_folder: MakeFolder) -> None:
    folder = make_folder()
    spec = DecodingSpec(n_output=8, block_length=32, seed=0, ignore_eos=True)
    expected = denoise_alone(load_model(folder), PROMPT, spec, cache_mode="dual", threshold=0.9)
    result = invoke(denoise, "--model", folder, "--prompt-ids", "7,8,9", "--output-len", 8)
    assert ",".join(map(str, expected.sequence[3:])) in result.stdout
    assert f"forwards  {expected.nfe}, " in result.stdout
    assert "finished  length" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-ids", "1;2"], "'1;2' is no list of token ids; use for example 1,2,3"),
        (["--threshold", "0.5", "--quota", "2"], "exclude each other"),
        (["--threshold", "1.5"], "1.5 is not from 0 to 1"),
        (["--cache", "triple"], "'triple' is not one of"),
        (["--output-len", "0"], "--output-len"),
        (["--quota", "0"], "--quota"),
        (["--threads", "100000"], "should be less than or equal to 256"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--pack-weights", "on"], "'on' is not one of"),
    ],
)
def test_denoise_says_what_is_wrong_with_an_option(
    make_folder: MakeFolder, options: list[str], words: str
) -> None:
    given = {"--model": str(make_folder()), "--prompt-ids": "1", "--output-len": "8"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    result = invoke(denoise, *(part for option in given.items() for part in option))
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("how", "is_packed"), [([], True), (["--pack-weights", "off"], False)])
def test_denoise_packs_weights_where_that_pays_unless_told(
    make_folder: MakeFolder, packed_matrices: list[object], how: list[str], is_packed: bool
) -> None:
    options = ["--model", make_folder(), "--prompt-ids", "7,8,9", "--output-len", 8]
    denoise_json(*options, *how)
    assert bool(packed_matrices) == is_packed


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"--prompt-ids": "61"}, InvalidRequestError),
        ({"--output-len": 600}, NeverFitsError),
        ({"--output-len": 10**12}, NeverFitsError),
        ({"--model": "/nowhere"}, ModelFolderError),
    ],
)
def test_denoise_raises_for_what_cannot_be_run(
    make_folder: MakeFolder, options: dict[str, object], error: type[DiLaServeError]
) -> None:
    given = {"--model": make_folder(), "--prompt-ids": 1, "--output-len": 8} | options
    result = invoke(denoise, *(part for option in given.items() for part in option))
    assert isinstance(result.exception, error)


# --- replay --------------------------------------------------------------------------------------

SPEC = DecodingSpec(n_output=24, block_length=8, seed=5, temperature=1.0, ignore_eos=True)


@pytest.fixture
def folder(make_folder: MakeFolder) -> Path:
    folder = make_folder()
    (folder / "tokenizer.json").write_text("{}")
    return folder


def serve(
    url: str,
    model: Model,
    cache_mode: CacheMode = "dual",
    *,
    falsify: int = 0,
    mode_of_last: CacheMode | None = None,
) -> str:
    """Commit the steps of a request as a worker would, with the tokens of one step `falsify`d, or
    the last one said to be of another cache mode."""
    engine = engine_for_one(model, cache_mode=cache_mode, n_tokens=27)
    engine.add(fresh_request(PROMPT, SPEC, Credit(0.8, 99)))
    steps = []
    while (output := engine.step()) is not None:
        steps += output.steps
    modes = [cache_mode] * (len(steps) - 1) + [mode_of_last or cache_mode]
    return asyncio.run(_store_steps(url, steps, modes, falsify))


async def _store_steps(
    url: str, steps: list[StepOutput], modes: list[CacheMode], falsify: int
) -> str:
    store = await connect_redis(url)
    request_id = await admitted(store, prompt=PROMPT, spec=SPEC)
    for step, cache_mode in zip(steps, modes, strict=True):
        tokens = [t ^ 1 for t in step.tokens] if step.step == falsify else step.tokens
        commit = step_of(
            request_id,
            step.step,
            dict(zip(step.positions, tokens, strict=True)),
            kind=step.kind,
            block=step.block,
            threshold=step.threshold,
            cache_mode=cache_mode,
            finish_reason=step.finish_reason,
        )
        assert await store.commit([commit]) == ["committed"]
    await store.close()
    return request_id


def test_replay_agrees(redis_url: str, folder: Path) -> None:
    request_id = serve(redis_url, load_model(folder))
    options = [request_id, "--model", folder, "--redis-url", redis_url]
    result = invoke(replay, *options)
    assert result.exit_code == 0, result.output
    assert "text    identical: 24 of 24 tokens committed" in result.stdout
    report = json.loads(invoke(replay, *options, "--json").stdout)
    assert (report["request_id"], report["agrees"]) == (request_id, True)
    assert report["n_verified"] == report["n_steps"] > 3
    assert report["difference"] is None


@pytest.mark.parametrize(("how", "is_packed"), [([], True), (["--pack-weights", "off"], False)])
def test_replay_packs_weights_where_that_pays_unless_told(
    redis_url: str,
    folder: Path,
    packed_matrices: list[object],
    how: list[str],
    is_packed: bool,
) -> None:
    request_id = serve(redis_url, load_model(folder, packs=False))
    result = invoke(replay, request_id, "--model", folder, "--redis-url", redis_url, *how)
    assert result.exit_code == 0, result.output
    assert bool(packed_matrices) == is_packed


def test_replay_tells_the_first_difference(redis_url: str, folder: Path) -> None:
    request_id = serve(redis_url, load_model(folder), falsify=3)
    options = [request_id, "--model", folder, "--redis-url", redis_url]
    result = invoke(replay, *options)
    assert result.exit_code == 1
    assert "text    DIFFERENT" in result.stdout
    assert "step 3 is the first to differ" in result.stdout
    assert "was it served with another model, --dtype or --pack-weights?" in result.stdout
    result = invoke(replay, *options, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["difference"]["step"] == 3


@pytest.mark.parametrize("cache_mode", ["none", "prefix"])
def test_replay_takes_the_cache_mode_of_the_record(
    redis_url: str, folder: Path, cache_mode: CacheMode
) -> None:
    request_id = serve(redis_url, load_model(folder), cache_mode)
    options = [request_id, "--model", folder, "--redis-url", redis_url]
    result = invoke(replay, *options)
    assert result.exit_code == 0, result.output


def test_replay_refuses_a_record_of_several_cache_modes(redis_url: str, folder: Path) -> None:
    request_id = serve(redis_url, load_model(folder), "dual", mode_of_last="prefix")
    options = [request_id, "--model", folder, "--redis-url", redis_url]
    result = invoke(replay, *options)
    assert isinstance(result.exception, InvalidRequestError)
    assert "cache modes dual, prefix" in str(result.exception)


def test_replay_of_an_unknown_request(redis_url: str, folder: Path) -> None:
    result = invoke(replay, "r-none", "--model", folder, "--redis-url", redis_url)
    assert isinstance(result.exception, InvalidRequestError)
    assert "r-none is not in the store" in str(result.exception)
