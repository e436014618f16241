"""`dilaserve simulate`, as it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dilaserve.errors import DiLaServeError
from dilaserve_bench.twin.command import simulate
from dilaserve_bench.twin.faults import Fault, parse_fault
from dilaserve_scheduler.settings import SchedulerSettings

DILASERVE = Path(sys.executable).with_name("dilaserve")
SMALL = ["--instances", "2xtp1", "--rate", "1.5", "--requests", "20"]
NONSENSE = [
    *((name, "nan") for name in ("threshold", "overhead", "rate", "speed", "slo", "horizon")),
    *((name, "inf") for name in ("rate", "overhead", "speed", "slo", "predictor-error")),
    *((name, "-1") for name in ("budget", "requests", "prompt", "output", "problems")),
    *((name, "0") for name in ("budget", "requests", "prompt", "output", "problems", "run-ahead")),
    *((name, "-1.0") for name in ("threshold", "overhead", "rate", "speed", "slo", "horizon")),
    *((name, "0.0") for name in ("overhead", "rate", "speed", "slo", "horizon")),
    ("threshold", "1.5"),
    ("predictor-error", "nan"),
]


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(simulate)
    return CliRunner().invoke(app, arguments, catch_exceptions=True)


def answer(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_report_as_json() -> None:
    fixed = ("--policy", "infaas", "--threshold", "0.8")
    document = answer(*SMALL, "--seeds", "2", "--first-seed", "5", *fixed)
    assert document["seeds"] == [5, 6]
    assert document["scenario"]["instances"] == "2xtp1"
    assert document["mean_threshold"]["mean"] == pytest.approx(0.8)
    assert [run["n_done"] for run in document["runs"]] == [20, 20]
    assert document["attainment"] == {"mean": 1.0, "ci95": 0.0}


def test_the_policy_is_the_one_that_serves() -> None:
    assert answer(*SMALL)["scenario"]["policy"] == SchedulerSettings().policy


def test_report_for_people_and_a_plot(tmp_path: Path) -> None:
    result = invoke(*SMALL, "--plot", str(tmp_path / "page.svg"))
    assert result.exit_code == 0, result.output
    assert "SLO attainment" in result.stdout
    assert (tmp_path / "page.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--average-day", "--sizes", "sharegpt", "--slo", "12.5"],
        ["--run-ahead", "1"],
        ["--cache", "none"],
        ["--instances", "1xtp1,1xtp4", "--overhead", "1.5"],
        ["--fault", "t=2:kill=0:for=1", "--fault", "t=4:restart=0.5"],
    ],
)
def test_options_reach_the_simulation(arguments: list[str]) -> None:
    document = answer(*SMALL, *arguments)
    assert document["runs"][0]["n_done"] == 20
    assert document["runs"][0]["is_complete"]


def test_traces_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n0,100,30\n1,200,60\n2,50,90\n")
    document = answer("--instances", "1xtp1", "--trace", str(path), "--speed", "2")
    assert document["runs"][0]["n_done"] == 3
    path.write_text("model,t_s,rps\nm,0,1.0\nm,10,2.0\n")
    document = answer("--instances", "1xtp1", "--trace", str(path), "--requests", "5")
    assert document["runs"][0]["n_done"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "magic"], "magic"),
        (["--instances", "many"], "8xtp1,2xtp4"),
        (["--instances", "2xtp3"], "TP degree 3"),
        (["--fault", "t=1:kill=2"], "2 instances"),
        (["--profile", "nowhere.json"], "nowhere.json"),
        (["--average-day", "--trace", "x.csv"], "exclude"),
        (["--average-day", "--speed", "1e-9"], "nobody arrives"),
        (["--instances", "99999999xtp1"], "8xtp1,2xtp4"),
        *(([f"--{name}", value], f"--{name} {value}") for name, value in NONSENSE),
        (["--plot", "nowhere/page.svg"], "no folder"),
        (["--plot", "page.gif"], ".svg"),
        (["--output", "1000000000"], "1e+06"),
        (["--prompt", "1000000000"], "1e+06"),
        (["--overhead", "1e9"], "1000"),
        (["--rate", "1e-9"], "--horizon"),
    ],
)
def test_what_cannot_be_simulated_is_named(arguments: list[str], message: str) -> None:
    result = invoke(*SMALL, *arguments)
    assert isinstance(result.exception, DiLaServeError)
    assert message in str(result.exception)


def test_a_run_without_instances_is_broken_off() -> None:
    gone = ["--fault", "t=1:kill=0", "--fault", "t=2:leave=1"]
    (run,) = answer(*SMALL, *gone)["runs"]
    assert not run["is_complete"]
    (run,) = answer(*SMALL, *gone[:-1], "t=2:leave=1:for=60")["runs"]
    assert run["is_complete"]


def test_faults_as_they_are_written() -> None:
    assert parse_fault("t=10:kill=1", 2) == Fault(at_s=10.0, action="kill", instance=1)
    assert parse_fault("t=1.5:leave=0:for=2", 2) == Fault(at_s=1.5, action="leave", for_s=2.0)
    assert parse_fault("t=3:pause=0.5", 2) == Fault(at_s=3.0, action="pause", for_s=0.5)
    for text in ("kill=0", "t=1", "t=1:kill=x", "t=1:pause=1:for=2", "t=-1:kill=0", "t=1:burn=0"):
        with pytest.raises(DiLaServeError, match="unknown"):
            parse_fault(text, 2)


def test_nothing_depends_on_the_process() -> None:
    """Hashes of strings differ from process to process; runs must not."""
    faults = ["--fault", "t=2:kill=0:for=1", "--fault", "t=3:restart=0.5"]
    arguments = [DILASERVE, "simulate", *SMALL, "--requests", "60", *faults, "--json"]
    runs = []
    for seed in ("1", "2"):
        environ = os.environ | {"PYTHONHASHSEED": seed}
        output = subprocess.run(arguments, env=environ, capture_output=True, check=True).stdout
        (run,) = json.loads(output)["runs"]
        runs.append({key: value for key, value in run.items() if key != "wall_s"})
    assert runs[0] == runs[1]
