"""`dilaserve experiment`, as it is called: with an experiment that only counts."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments import command
from dilaserve_bench.experiments.document import Document
from dilaserve_bench.experiments.experiment import Experiment, Session
from dilaserve_bench.experiments.page import Page, Table
from dilaserve_bench.experiments.registry import EXPERIMENTS, load_experiment

N_POINTS = 3


class Count(msgspec.Struct, frozen=True):
    point: int
    value: int


class Counting:
    """Measures its points; asked to, it is interrupted while it measures one of them."""

    def __init__(self) -> None:
        self.measured: list[int] = []
        self.interrupted_at: int | None = None

    def run(self, session: Session) -> Document[Count]:
        rows = []
        for point in range(N_POINTS):
            row = session.measured({"point": point}, Count, lambda p=point: self._measure(p))
            if row is not None:
                rows.append(row)
        return session.document("counting", rows, n=1, published={"source": "nobody"})

    def _measure(self, point: int) -> Count | None:
        if point == self.interrupted_at:
            signal.raise_signal(signal.SIGINT)
            return None
        self.measured.append(point)
        return Count(point, 10 * point)


def draw(document: Document[Count]) -> Figure:
    figure = Figure()
    figure.subplots().plot([row.value for row in document.rows])
    return figure


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    each = Counting()
    experiment = Experiment(
        name="counting",
        what="counts",
        paper="",
        row=Count,
        run=each.run,
        page=lambda d: Page([Table(("point",), [[str(row.point)] for row in d.rows])], ["Done."]),
        draw=draw,
        takes=frozenset({"rates"}),
    )
    monkeypatch.setattr(command, "load_experiment", lambda name: experiment)
    monkeypatch.setenv("DILASERVE_HOME", str(tmp_path / "home"))
    return each


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command.experiment)
    return CliRunner().invoke(app, arguments, catch_exceptions=True)


def answer(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_one_document(counting: Counting) -> None:
    document = answer("counting")
    assert (document["name"], document["seeds"], document["n"]) == ("counting", [*range(8)], 1)
    assert document["rows"] == [{"point": p, "value": 10 * p} for p in range(N_POINTS)]
    assert document["published"] == {"source": "nobody"}
    assert (document["is_quick"], document["is_complete"]) == (False, True)
    assert document["command"] == "dilaserve experiment counting"


def test_the_command_that_repeats_it_has_all_options(counting: Counting) -> None:
    document = answer("counting", "--quick", "--seeds", "3", "--rates", "1.5,2")
    assert document["command"] == "dilaserve experiment counting --quick --seeds 3 --rates 1.5,2.0"
    assert document["seeds"] == [0, 1, 2]


def test_text_says_what_is_quick(counting: Counting) -> None:
    assert invoke("counting", "--quick").stdout.startswith("QUICK: this tries the plumbing")
    assert invoke("counting").stdout.startswith("point\n0\n1\n2\n\nDone.")


def test_points_are_measured_once(counting: Counting) -> None:
    first = answer("counting")
    assert counting.measured == [0, 1, 2]
    assert answer("counting") == first
    assert counting.measured == [0, 1, 2]
    answer("counting", "--fresh")
    assert counting.measured == [0, 1, 2] * 2


def test_points_of_other_code_are_measured_again(
    counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer("counting")
    monkeypatch.setattr(command, "code_fingerprint", lambda: "other")
    answer("counting")
    assert counting.measured == [0, 1, 2] * 2


def test_ctrl_c_prints_what_there_is_and_the_next_run_goes_on(counting: Counting) -> None:
    counting.interrupted_at = 1
    document = answer("counting")
    assert [row["point"] for row in document["rows"]] == [0]
    assert not document["is_complete"]
    assert "INCOMPLETE" in invoke("counting").stdout
    counting.interrupted_at = None
    document = answer("counting")
    assert [row["point"] for row in document["rows"]] == [0, 1, 2]
    assert document["is_complete"]
    assert counting.measured == [0, 1, 2]


def test_result_is_kept(counting: Counting, tmp_path: Path) -> None:
    out = tmp_path / "counting.json"
    document = answer("counting", "--out", str(out))
    assert json.loads(out.read_text()) == document
    assert document["commit"] is None or len(document["commit"].rstrip("+")) == 12


def test_a_full_result_is_not_replaced_by_less(counting: Counting, tmp_path: Path) -> None:
    out = tmp_path / "counting.json"
    document = answer("counting", "--out", str(out))
    with pytest.raises(DiLaServeError, match="holds a full result; give --quick another"):
        raise invoke("counting", "--quick", "--out", str(out)).exception
    counting.interrupted_at = 0
    result = invoke("counting", "--fresh", "--out", str(out))
    assert "was left as it was" in result.stderr
    assert json.loads(out.read_text()) == document


def test_an_interrupted_result_is_replaced(counting: Counting, tmp_path: Path) -> None:
    out = tmp_path / "counting.json"
    counting.interrupted_at = 2
    answer("counting", "--out", str(out))
    assert not json.loads(out.read_text())["is_complete"]
    counting.interrupted_at = None
    answer("counting", "--out", str(out))
    assert json.loads(out.read_text())["is_complete"]


def test_plot_into_a_file_or_a_folder(counting: Counting, tmp_path: Path) -> None:
    answer("counting", "--plot", str(tmp_path))
    answer("counting", "--plot", str(tmp_path / "again.svg"))
    first = (tmp_path / "counting.svg").read_bytes()
    assert first == (tmp_path / "again.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "infaas"], "knows no --policies infaas; it knows --seeds, --rates"),
        *(
            (["--rates", rates], f"{rates!r} are no numbers above 0; write for example")
            for rates in ("fast", "nan", "1.5,inf", "0", "1.5,-1")
        ),
        (["--out", "."], "--out . is a folder"),
        (["--plot", "plot.docx"], "plot plot.docx cannot be written; give a folder that exists"),
        (["--out", "nowhere/at/all.json"], "there is no folder nowhere/at"),
    ],
)
def test_errors_name_the_remedy(counting: Counting, arguments: list[str], message: str) -> None:
    error = invoke("counting", *arguments).exception
    assert isinstance(error, DiLaServeError)
    assert message in str(error)


@pytest.mark.parametrize("overhead", ["inf", "1e9", "nan", "0"])
def test_an_overhead_that_would_never_end_is_refused(counting: Counting, overhead: str) -> None:
    result = invoke("counting", "--overhead", overhead)
    assert result.exit_code == 2
    assert "--overhead" in result.output


def test_unknown_name_gives_the_list() -> None:
    error = invoke("fig99").exception
    assert isinstance(error, DiLaServeError)
    assert "experiment 'fig99' is unknown; use list, or one of calibration" in str(error)


def test_list_has_everything() -> None:
    lines = invoke("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)
    listed = json.loads(invoke("list", "--json").stdout)
    assert [entry["name"] for entry in listed] == list(EXPERIMENTS)
    assert all(entry["what"] for entry in listed)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_entry_leads_to_an_experiment(name: str) -> None:
    assert load_experiment(name).name in EXPERIMENTS
