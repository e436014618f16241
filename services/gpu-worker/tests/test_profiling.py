"""`dilaserve profile`: what is measured, that passes are what they are called, and going on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from dilaserve.errors import ModelFolderError
from dilaserve.messages import CacheMode
from dilaserve.profiles import (
    LatencyProfile,
    Point,
    ProfileError,
    ProfileSet,
    load_profiles,
    save_profiles,
)
from dilaserve_gpu_worker import profile_command
from dilaserve_gpu_worker.engine.engine import Engine
from dilaserve_gpu_worker.engine.types import BatchOutput
from dilaserve_gpu_worker.engine.validate import Limits
from dilaserve_gpu_worker.models.model import Model
from dilaserve_gpu_worker.models.products import packing_pays
from dilaserve_gpu_worker.profile_command import profile, with_point
from dilaserve_gpu_worker.profiling import Effort, Grid, Load, left_out, loads_of, measure
from dilaserve_scheduler.settings import SchedulerSettings

GRID = Grid(lengths=(16, 48, 1024), rows=(1, 4, 64), n_output=16, block_length=8)
EFFORT = Effort(n_warm_up=1, n_passes=9, seconds=1e9)


def limits(n_kv_tokens: int | None = 1024) -> Limits:
    return Limits(100, max_sequence_length=512, max_batch_tokens=256, n_kv_tokens=n_kv_tokens)


def loads(cache_mode: CacheMode, n_kv_tokens: int | None = 1024) -> list[Load]:
    return loads_of(GRID, cache_mode, limits(n_kv_tokens))


def test_loads_are_those_that_fit() -> None:
    found = [(load.kind, load.n_rows, load.length, load.n_tokens) for load in loads("dual")]
    assert found == [
        ("cache", 1, 16, 8),
        ("cache", 4, 16, 32),
        ("cache", 1, 48, 8),
        ("cache", 4, 48, 32),
        ("recompute", 1, 16, 16),
        ("recompute", 4, 16, 64),
        ("recompute", 1, 48, 48),
        ("recompute", 4, 48, 192),
    ]
    assert {load.n_rows for load in loads("dual", n_kv_tokens=47)} == {1}
    assert {load.kind for load in loads("none", n_kv_tokens=None)} == {"recompute"}
    assert {(load.length, load.n_tokens) for load in loads("prefix") if load.kind == "cache"} == {
        (16, 8), (16, 32), (48, 16), (48, 64)
    }  # fmt: skip


def test_what_is_left_out_is_told_with_the_reason() -> None:
    assert left_out(GRID, "dual", limits()) == [
        "recompute 64 x 16, 64 x 48: above the 256 tokens of a pass (--max-batch-tokens)",
        "lengths 1024: above the model's 512 tokens",
        "cache 64 x 16, 64 x 48: above the 256 tokens of a pass (--max-batch-tokens)",
    ]
    assert left_out(GRID, "dual", limits(128))[-1] == (
        "cache 4 x 48: above the KV pool of 128 tokens"
    )
    assert "lengths 300: above the 256 tokens of a pass (--max-batch-tokens)" in left_out(
        replace(GRID, lengths=[16, 300]), "none", limits(None)
    )


def test_nothing_is_left_out_of_a_grid_that_fits() -> None:
    grid = replace(GRID, lengths=[16, 48], rows=[1, 4])
    assert left_out(grid, "dual", limits()) == []
    assert len(loads_of(grid, "dual", limits())) == 8


class WatchedEngine(Engine):
    """Keeps what its passes ran, and lets each seem to take as many seconds as it had tokens."""

    passes: list[tuple[set[str], int, int]]

    def step(self) -> BatchOutput | None:
        plan = self.plan()
        if plan is None:
            return None
        output = self.unmask(plan, self.forward(plan))
        self.passes.append(({row.kind for row in plan.rows}, len(plan.rows), plan.n_tokens))
        return BatchOutput(float(plan.n_tokens), plan.n_tokens, 0, output.steps)


@pytest.mark.parametrize("name", ["model", "random_dream"])
@pytest.mark.parametrize("cache_mode", ["dual", "prefix", "none"])
def test_measured_passes_are_of_their_load(
    request: pytest.FixtureRequest, name: str, cache_mode: CacheMode
) -> None:
    any_model: Model = request.getfixturevalue(name)
    engine = WatchedEngine(any_model, cache_mode=cache_mode, n_kv_tokens=1024, max_batch_tokens=192)
    for load in loads(cache_mode):
        if load.n_tokens > 192:
            continue
        engine.passes = []
        point = measure(engine, any_model.config, GRID, load, EFFORT)
        key = (point.kind, point.n_tokens, point.n_rows, point.n_keys)
        assert key == load.key
        assert point.seconds == load.n_tokens
        measured = [p for p in engine.passes if p == ({load.kind}, load.n_rows, load.n_tokens)]
        assert len(measured) >= 10
        assert not engine.holds("profile-0")
        assert engine.n_free_kv_tokens == (0 if cache_mode == "none" else 1024)


def test_a_cache_step_is_measured_whose_first_steps_do_not_fit_into_one_pass(model: Model) -> None:
    engine = WatchedEngine(model, cache_mode="dual", n_kv_tokens=1024, max_batch_tokens=64)
    engine.passes = []
    load = Load("cache", n_rows=8, length=48, n_tokens=64)
    assert measure(engine, model.config, GRID, load, EFFORT).seconds == 64
    assert len([p for p in engine.passes if p[0] == {"recompute"}]) >= 8


def test_a_slow_point_gets_fewer_passes(model: Model) -> None:
    engine = WatchedEngine(model, cache_mode="none", n_kv_tokens=0, max_batch_tokens=64)
    engine.passes = []
    load = Load("recompute", 1, 16, 16)
    measure(engine, model.config, GRID, load, Effort(n_warm_up=2, n_passes=99, seconds=70.0))
    assert len(engine.passes) == 2 + 5  # of 16 seconds each


def test_an_engine_that_fails_is_left_empty(model: Model) -> None:
    engine = WatchedEngine(model, cache_mode="dual", n_kv_tokens=1024, max_batch_tokens=32)
    engine.passes = []
    with pytest.raises(RuntimeError, match="4 rows were to run in one pass, 2 did"):
        measure(engine, model.config, GRID, Load("recompute", 4, 16, 64), EFFORT)
    assert engine.n_free_kv_tokens == 1024
    assert not engine.has_work()


# --- the file ------------------------------------------------------------------------------------


def run_cli(folder: Path | None, out: Path, *options: str) -> Result:
    app = typer.Typer()
    app.command()(profile)
    sizes = ["--lengths", "16,64", "--rows", "1,3", "--block", "8", "--output-len", "16"]
    model = [] if folder is None else ["--model", str(folder)]
    return CliRunner().invoke(app, [*model, "--out", str(out), *sizes, "--passes", "3", *options])


def test_profile_is_written_and_the_scheduler_takes_it(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "profile.json"
    result = run_cli(make_folder(), out, "--model-name", "m")
    assert result.exit_code == 0, result.output
    profiles = load_profiles(out)
    assert (profiles.model, profiles.tp_degrees) == ("m", [1])
    [measured] = profiles.profiles
    assert {(p.kind, p.n_rows, p.n_keys, p.n_tokens) for p in measured.points} == {
        ("recompute", 1, 16, 16), ("recompute", 3, 16, 48),
        ("recompute", 1, 64, 64), ("recompute", 3, 64, 192),
        ("cache", 1, 16, 8), ("cache", 3, 16, 24), ("cache", 1, 64, 8), ("cache", 3, 64, 24),
    }  # fmt: skip
    assert "TP-1 recompute: 4 points, 16 tokens" in result.output
    options = SchedulerSettings(policy="dilaserve", profile=str(out)).options()
    assert options.profiles == profiles


def test_a_length_that_the_model_does_not_take_is_left_out_aloud(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = make_folder(), tmp_path / "profile.json"
    longest = json.loads((folder / "config.json").read_text())["max_sequence_length"]
    result = run_cli(folder, out, "--lengths", f"16,{8 * longest}")
    assert result.exit_code == 0, result.output
    assert f"TP-1 is measured without lengths {8 * longest}: above" in result.stderr
    assert {p.n_keys for p in load_profiles(out).profiles[0].points} == {16}


def test_profile_finds_the_model_as_the_other_commands_do(
    make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_folder(), tmp_path / "profile.json"
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("DILASERVE_MODEL", str(folder))
    assert run_cli(None, out).exit_code == 0
    assert load_profiles(out).model == folder.name
    monkeypatch.setenv("DILASERVE_MODEL", str(tmp_path))
    error = run_cli(None, out).exception
    assert isinstance(error, ModelFolderError)
    assert f"model folder {tmp_path}: no config.json" in str(error)


def test_a_type_that_there_is_not_is_refused(tmp_path: Path) -> None:
    result = run_cli(tmp_path, tmp_path / "p.json", "--dtype", "int8")
    assert (result.exit_code, "'int8' is not one of" in result.output) == (2, True)


def test_a_degree_is_added_to_the_file(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = make_folder(vocab_size=62), tmp_path / "profile.json"
    assert run_cli(folder, out).exit_code == 0
    result = run_cli(folder, out, "--tp", "1,2")
    assert result.exit_code == 0, result.output
    one, two = load_profiles(out).profiles
    assert (one.tp_degree, two.tp_degree) == (1, 2)
    assert [p.n_tokens for p in two.points] == [p.n_tokens for p in one.points]
    assert [p.seconds for p in two.points] != [p.seconds for p in one.points]


def test_a_rerun_measures_what_is_missing(
    make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = make_folder(), tmp_path / "profile.json"
    n_left = 3

    def interrupted(*args: object) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        save = profile_command.save_profiles
        patched.setattr(
            profile_command,
            "save_profiles",
            lambda profiles, path: (interrupted(), save(profiles, path)),
        )
        result = run_cli(folder, out)
    assert (result.exit_code, "interrupted" in result.output) == (130, True)
    kept = load_profiles(out).profiles[0].points
    assert len(kept) == 3
    assert run_cli(folder, out).exit_code == 0
    complete = load_profiles(out).profiles[0].points
    assert (complete[:3], len(complete)) == (kept, 8)
    written = out.read_bytes()
    assert run_cli(folder, out).exit_code == 0
    assert out.read_bytes() == written


PACKED = packing_pays(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cache", "prefix"], "cache 'dual', and now it is 'prefix'"),
        (["--cuda-graphs", "off"], "cuda-graphs 'auto', and now it is 'off'"),
        pytest.param(
            ["--pack-weights", "off"],
            "products 'packed', and now it is 'plain'",
            marks=pytest.mark.skipif(not PACKED, reason="packing does not pay on this CPU"),
        ),
    ],
)
def test_a_file_of_another_measurement_is_refused(
    make_folder: Callable[..., Path], tmp_path: Path, options: list[str], words: str
) -> None:
    folder, out = make_folder(), tmp_path / "profile.json"
    assert run_cli(folder, out).exit_code == 0
    before = out.read_bytes()
    result = run_cli(folder, out, *options)
    assert isinstance(result.exception, ProfileError)
    assert f"was measured with {words}" in str(result.exception)
    assert out.read_bytes() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_compiled_blocks_are_another_measurement(
    make_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)  # refused before a pass compiles
    folder, out = make_folder(), tmp_path / "profile.json"
    assert run_cli(folder, out, "--pack-weights", "off").exit_code == 0
    result = run_cli(folder, out, "--compile", "on")
    assert "was measured with compile 'off', and now it is 'on'" in str(result.exception)


def test_a_profile_names_what_a_pass_depends_on(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "profile.json"
    assert run_cli(make_folder(), out).exit_code == 0
    conditions = load_profiles(out).conditions
    assert set(conditions) == {
        "weights", "device", "dtype", "attention", "products", "kernels", "cuda-graphs",
        "compile", "threads", "cache", "block", "output-len",
    }  # fmt: skip
    named = {name: conditions[name] for name in ("dtype", "attention", "products", "compile")}
    assert named == {
        "dtype": "float32",
        "attention": "sdpa",
        "products": "packed" if PACKED else "plain",
        "compile": "off",
    }


def test_an_older_profile_is_read_but_not_gone_on_with(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = make_folder(), tmp_path / "profile.json"
    assert run_cli(folder, out).exit_code == 0
    profiles = load_profiles(out)
    older = msgspec.structs.replace(
        profiles,
        conditions={
            name: value
            for name, value in profiles.conditions.items()
            if name not in ("products", "kernels", "cuda-graphs", "compile")
        },
    )
    save_profiles(older, out)
    assert SchedulerSettings(profile=str(out)).options().profiles == older
    result = run_cli(folder, out)
    assert isinstance(result.exception, ProfileError)
    assert "names no products, and now it is" in str(result.exception)
    assert load_profiles(out) == older


def test_counts_that_are_none_are_refused(tmp_path: Path) -> None:
    for value in ("0", "1,1", "a", ""):
        result = run_cli(tmp_path, tmp_path / "p.json", "--rows", value)
        assert result.exit_code == 2
        assert "--rows" in result.output


def test_lengths_without_a_pass_to_measure_are_refused(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = make_folder(), tmp_path / "p.json"
    result = run_cli(folder, out, "--lengths", "1,64")
    assert (result.exit_code, "--lengths" in result.output) == (2, True)
    for option, value in (("--lengths", "4096"), ("--max-batch-tokens", "10")):
        result = run_cli(folder, out, option, value)
        assert isinstance(result.exception, ProfileError)
        assert "no length of --lengths fits into a pass of" in str(result.exception)
    assert not out.exists()


def test_points_of_degrees_stay_apart() -> None:
    profiles = ProfileSet(model="m", device="d", profiles=[])
    for degree, n_tokens in ((2, 32), (1, 32), (2, 64)):
        profiles = with_point(profiles, degree, Point(n_tokens, 1.0))
    assert profiles.profiles == [
        LatencyProfile(tp_degree=1, points=[Point(32, 1.0)]),
        LatencyProfile(tp_degree=2, points=[Point(32, 1.0), Point(64, 1.0)]),
    ]
