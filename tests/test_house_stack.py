"""`dilaserve up` and the commands that find its stack, with real processes and the tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DILASERVE = Path(sys.executable).with_name("dilaserve")
WAIT_S = 60.0
PROMPT = "Running total of 3 5 2 7 1 8 6 4"
FIXED = ("--min-confidence", "0.9")
"""The highest threshold that the policy has: two answers are the same, however loaded we are."""
SERVICES = {"nats", "valkey", "scheduler", "predictor", "gpu-worker", "gateway"}


@dataclass(frozen=True)
class Home:
    """A folder in which a stack runs."""

    path: Path

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the installed command as a user in that folder would."""
        return subprocess.run(
            [DILASERVE, *arguments],
            cwd=self.path,
            env=self.environ(),
            capture_output=True,
            text=True,
            check=check,
            timeout=100,
        )

    def environ(self) -> dict[str, str]:
        ours = {name for name in os.environ if name.startswith("DILASERVE_")}
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        return kept | {"PATH": f"{DILASERVE.parent}:{os.environ['PATH']}", "COLUMNS": "100"}

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.path / ".dilaserve" / "stack.json").read_text())
        return state

    def child(self, name: str) -> dict[str, Any]:
        return next(child for child in self.state()["children"] if child["name"] == name)

    def log(self) -> str:
        return (self.path / ".dilaserve" / "up.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A stack with two workers, detached."""
    home = Home(tmp_path_factory.mktemp("stack"))
    model = str(ROOT / "models" / "tiny")
    home.run("up", "--workers", "2", "--detach", "--model", model)
    try:
        yield home
    finally:
        home.run("down")


def until(condition: Any, message: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.05)


def test_status_lists_every_process(stack: Home) -> None:
    report = json.loads(stack.run("status", "--json").stdout)
    rows = report["processes"]
    assert {row["service"] for row in rows} == SERVICES | {"supervisor"}
    assert [row["service"] for row in rows].count("gpu-worker") == 2
    for row in rows:
        assert row["id"]
        os.kill(row["pid"], 0)
    assert all(row["address"] for row in rows if row["service"] != "supervisor")
    assert len(report["instances"]) == 2
    assert report["term"] >= 1
    assert report["problems"] == []


def test_status_for_people(stack: Home) -> None:
    output = stack.run("status").stdout
    assert stack.state()["gateway_url"] in output
    assert re.search(r"^gpu-worker +worker-2-\w+ +\d+ +ready", output, re.MULTILINE)


def test_generate_streams_an_answer(stack: Home) -> None:
    answer = stack.run("generate", PROMPT, *FIXED).stdout
    assert answer.strip()
    assert stack.run("generate", PROMPT, *FIXED).stdout == answer, "greedy decoding repeats itself"


def test_watch_ends_with_the_same_tokens(stack: Home) -> None:
    answer = stack.run("generate", PROMPT, *FIXED).stdout.strip()
    watched = stack.run("generate", PROMPT, "--watch", *FIXED, "--service-tier", "flex").stdout
    assert answer in watched.replace("\n", "")
    used = r"mean threshold 0\.90, SLO of 120000 ms (met|missed)"
    assert re.search(rf"\d+ tokens in \d+ steps, \d+ ms, {used};", watched)


def test_watched_request_replays_to_the_same_text(stack: Home) -> None:
    watched = stack.run("generate", PROMPT, "--watch", "--temperature", "1", "--seed", "7").stdout
    request_id = re.findall(r"dilaserve replay (\S+)", watched)[0]
    assert stack.run("replay", request_id).returncode == 0


def test_invalid_option_shows_the_gateways_remedy(stack: Home) -> None:
    result = stack.run("generate", PROMPT, "--temperature", "9", check=False)
    assert result.returncode == 1
    assert "temperature" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("service", ["gateway", "scheduler", "predictor", "gpu-worker"])
def test_ping_finds_a_service_here(stack: Home, service: str) -> None:
    assert stack.run("ping", service, "--here").returncode == 0


def test_ping_of_nobody_fails(stack: Home) -> None:
    result = stack.run("ping", "oracle", check=False)
    assert result.returncode == 1
    assert "no oracle answers" in result.stderr


def test_sub_prints_readable_traffic(stack: Home) -> None:
    output = stack.run("sub", "dlm.>", "--count", "2").stdout
    head, body = output.splitlines()[:2]
    assert re.fullmatch(r'\[#1\] Received on "dlm\.v1\.evt\.worker-\d-\w+\.hb"', head)
    assert json.loads(body)["type"] == "heartbeat"


def test_second_stack_in_the_same_folder_is_refused(stack: Home) -> None:
    result = stack.run("up", "--model", str(ROOT / "models" / "tiny"), check=False)
    assert result.returncode == 1
    assert "a stack already runs" in result.stderr


def test_second_detached_start_leaves_the_log_of_the_first(stack: Home) -> None:
    log = stack.log()
    result = stack.run("up", "--detach", check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("dilaserve: a stack already runs")
    assert stack.log().startswith(log)


@pytest.mark.parametrize(
    "name", ["worker-1", "scheduler", "predictor", "gateway", "nats", "valkey"]
)
def test_killed_child_comes_back_at_its_address_and_the_stack_serves(
    stack: Home, name: str
) -> None:
    before = stack.child(name)
    os.kill(before["pid"], signal.SIGKILL)

    def is_back() -> bool:
        now = stack.child(name)
        return bool(now["phase"] == "ready" and now["pid"] != before["pid"])

    until(is_back, f"{name} did not come back; {stack.log()[-3000:]}")
    assert stack.child(name)["address"] == before["address"]
    assert stack.child(name)["n_restarts"] == before["n_restarts"] + 1
    until(
        lambda: stack.run("generate", PROMPT, check=False).returncode == 0,
        f"no answer after {name} was killed; {stack.log()[-3000:]}",
    )


def test_status_says_that_the_scheduler_does_not_answer(stack: Home) -> None:
    pid = stack.child("scheduler")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        report = json.loads(stack.run("status", "--json").stdout)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert report["term"] is None
    assert report["instances"] == []
    assert "no scheduler answers" in report["problems"][0]
    assert pid in [row["pid"] for row in report["processes"]]


def test_external_redis_that_is_none_is_refused_before_any_service_starts(tmp_path: Path) -> None:
    model = str(ROOT / "models" / "tiny")
    result = Home(tmp_path).run("up", "--model", model, "--redis-url", "foo://x", check=False)
    assert result.returncode == 1
    assert "\ndilaserve: DILASERVE_REDIS_URL='foo://x'" in result.stderr
    assert "use for example redis://" in result.stderr
    assert "starting it again" not in result.stderr


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    home = Home(tmp_path)
    model = str(ROOT / "models" / "tiny")
    process = subprocess.Popen(
        [DILASERVE, "up", "--model", model, "--sample"],
        cwd=tmp_path,
        env=home.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if "streamed by" in line:
            break
    pids = [child["pid"] for child in home.state()["children"]]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert any("streamed by tiny" in line for line in shown), shown
    assert len(pids) == len(SERVICES)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (tmp_path / ".dilaserve" / "stack.json").exists()


def test_readme_snippets_run(stack: Home) -> None:
    readme = (ROOT / "README.md").read_text()
    python = "\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    assert "http://127.0.0.1:8000" in python
    script = python.replace("http://127.0.0.1:8000", stack.state()["gateway_url"])
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100
    ).stdout
    assert answer.strip()
    for line in commands_of(readme):
        words = line.split()
        if words[0] == "make" or words[1] in ("up", "down"):
            continue  # test_ctrl_c_ends_everything and the fixture
        subprocess.run(
            line, shell=True, cwd=stack.path, env=stack.environ(), check=True, timeout=100
        )


def commands_of(readme: str) -> list[str]:
    """The command lines of the bash snippets, as with `.venv/bin` on the PATH."""
    snippets = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    lines = [line for snippet in snippets for line in snippet.splitlines() if line.strip()]
    return [line.removeprefix(".venv/bin/") for line in lines]


def test_make_words_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    words = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    documents = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("infra/*.md")]
    used = {
        word
        for document in documents
        for word in re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text(), re.MULTILINE)
    }
    assert used
    assert used <= words
