"""`dilaserve plan` from files to records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from dilaserve_reconfigurator.command import plan
from dilaserve_reconfigurator.snapshot import PlanningError
from dilaserve_reconfigurator.whatif import mix_workload, parse_mix, parse_nodes, trace_workloads

from .test_planner import PROFILES


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DILASERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(PROFILES))
    steps = {"n_output": 256, "thresholds": [0.5, 0.9], "rows": [[32, 64]]}
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    (tmp_path / "mix.json").write_text(json.dumps({"classes": [[64, 64, 3.0], [128, 64, 1.0]]}))
    rows = ["at_s,n_prompt,n_output"]
    rows += [f"{1000 + second},64,64" for second in range(60)]  # 1 a second, then 45
    rows += [f"{1060 + number / 45},64,64" for number in range(45 * 60)]
    (tmp_path / "trace.csv").write_text("\n".join(rows))
    return tmp_path


def run(folder: Path, *arguments: str, check: bool = True) -> str:
    app = typer.Typer()
    app.command()(plan)
    model = ["--profile", str(folder / "profile.json"), "--steps", str(folder / "steps.json")]
    given = list(arguments) if arguments[0] == "explain" else [*model, *arguments]
    result = CliRunner().invoke(app, given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert not check or result.exit_code == 0, result.output
    return result.output


def records(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_plans_for_a_mix_and_explains_it_later(files: Path) -> None:
    options = ["--mix", str(files / "mix.json"), "--rate", "0.5", "--slo", "5"]
    [record] = records(run(files, *options, "--nodes", "2x4", "--present", "8xtp1", "--json"))
    assert record["verdict"] == "change"
    assert record["target"]["counts"] == {"1": 0, "2": 0, "4": 2}
    assert record["reasons"]
    assert [each["rate"] for each in record["inputs"]["classes"]] == [0.375, 0.125]
    explained = run(files, "explain", record["plan_id"])
    assert explained.startswith(f"{record['plan_id']}: change\n")
    assert records(run(files, "explain", record["plan_id"], "--json")) == [record]


def test_plans_along_a_trace(files: Path) -> None:
    options = ["--trace", str(files / "trace.csv"), "--interval", "60", "--slo", "5"]
    found = records(
        run(files, *options, "--nodes", "2x4", "--present", "8xtp1", "--launch", "1", "--json")
    )
    assert [record["made_at_s"] for record in found] == [60.0, 120.0]
    assert found[0]["target"]["counts"] == {"1": 0, "2": 0, "4": 2}
    assert found[1]["present"]["counts"] == {"1": 0, "2": 0, "4": 2}, "carried out in between"
    assert found[1]["target"]["counts"] == {"1": 8, "2": 0, "4": 0}


def test_unknown_plan_is_named(files: Path) -> None:
    with pytest.raises(PlanningError, match="there is no plan 'plan-x'"):
        run(files, "explain", "plan-x")


def test_inputs_that_are_missing_are_asked_for(files: Path) -> None:
    with pytest.raises(PlanningError, match="either --mix or --trace"):
        run(files, "--nodes", "2x4")


def test_mix_without_room_is_refused(files: Path) -> None:
    with pytest.raises(PlanningError, match="do not fit on nodes of"):
        run(files, "--mix", str(files / "mix.json"), "--nodes", "1x4", "--present", "2xtp4")


@pytest.mark.parametrize(
    ("text", "nodes"), [("4x8", (8, 8, 8, 8)), ("8", (8,)), ("2x4, 1x2", (4, 4, 2))]
)
def test_nodes_as_written(text: str, nodes: tuple[int, ...]) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "4x", "x4", "2x0", "0x2", "four", "99999x8", "\u0664x8"])
def test_nodes_that_are_none(text: str) -> None:
    with pytest.raises(PlanningError, match="are not written like 4x8"):
        parse_nodes(text)


def test_mix_as_written() -> None:
    assert parse_mix("8xtp1,2×TP-4", (1, 2, 4)) == {1: 8, 2: 0, 4: 2}
    with pytest.raises(PlanningError, match="is not written like"):
        parse_mix("8xtp3", (1, 2, 4))


def test_azure_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:{second:02},300,40" for second in range(60)]
    path.write_text("\n".join(lines))
    [(at_s, workload)] = trace_workloads(path, slo_s=5.0, interval_s=60.0)
    assert at_s == 60.0
    [each] = workload.classes
    assert (each.n_prompt, each.n_output) == (300, 40)
    assert each.rate == pytest.approx(60 / 59)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("at_s,n_prompt\n1,2\n", "line 2: 'n_output'"),
        ("", "holds no arrivals"),
        ("at_s,n_prompt,n_output\nnan,1,1\n", "line 2: no request arrives at nan"),
        ("at_s,n_prompt,n_output\n1,-1,1\n", "with -1"),
        ("at_s,n_prompt,n_output\n0,1,1\n1e300,1,1\n", "is 1e\\+300 s long"),
        ("at_s,n_prompt,n_output\n\udcff,1,1\n", "is no CSV file"),
    ],
)
def test_trace_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanningError, match=message):
        list(trace_workloads(path, slo_s=5.0, interval_s=60.0))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"classes": []}',
        '{"classes": [[1, 0, 1]]}',
        '{"classes": [[1, 1, 1e308], [1, 1, 1e308]]}',
    ],
)
def test_mix_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mix.json"
    path.write_text(text)
    with pytest.raises(PlanningError, match=r"class mix .*mix\.json"):
        mix_workload(path, slo_s=5.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--slo 0", "an SLO above 0"),
        ("--slo nan", "an SLO above 0"),
        ("--rate 0", "give a rate above 0"),
        ("--rate=-1", "give a rate above 0"),
        ("--rate nan", "give a rate above 0"),
        ("--rate 1e300", "up to 1e\\+06"),
        ("--safety 0", "safety factor on the rates 0"),
        ("--overhead=-1", "overhead -1"),
        ("--overhead nan", "overhead nan"),
        ("--budget 0", "token budget of an instance 0"),
        ("--time-limit 0", "time limit 0"),
        ("--launch=-1", "launch -1"),
        ("--min-gain nan", "gain nan"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(files: Path, options: str, message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        run(files, "--mix", str(files / "mix.json"), *options.split())
    assert not (files / "home/plans").exists()


@pytest.mark.parametrize("options", ["--interval 0", "--interval nan", "--speed 0", "--speed=-1"])
def test_no_time_passes_backwards_along_a_trace(files: Path, options: str) -> None:
    with pytest.raises(PlanningError, match="have to be above 0"):
        run(files, "--trace", str(files / "trace.csv"), *options.split())


def test_trace_that_is_too_short_is_said(files: Path) -> None:
    with pytest.raises(PlanningError, match="too short for a plan; give"):
        run(files, "--trace", str(files / "trace.csv"), "--interval", "3000")


@pytest.mark.parametrize("plan_id", ["a\0b", "../trace", "..", ""])
def test_plan_of_no_possible_name_is_not_there(files: Path, plan_id: str) -> None:
    with pytest.raises(PlanningError, match="there is no plan"):
        run(files, "explain", plan_id)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"plan_id":"plan-x"}'])
def test_plan_that_is_malformed_is_named(files: Path, content: bytes) -> None:
    (files / "home/plans").mkdir(parents=True)
    (files / "home/plans/plan-x.json").write_bytes(content)
    with pytest.raises(PlanningError, match=r"plan-x\.json is malformed"):
        run(files, "explain", "plan-x")


def test_folder_that_takes_no_plans_is_named(files: Path) -> None:
    (files / "home").write_text("a file")
    with pytest.raises(PlanningError, match=r"cannot be kept in .*; set DILASERVE_HOME"):
        run(files, "--mix", str(files / "mix.json"), "--nodes", "1x4")
