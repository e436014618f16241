"""The command line: lazy loading, errors as one line, help."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dilaserve.cli import GROUP, build_cli
from dilaserve.commands.options import command_name
from dilaserve.supervisor.ports import is_free

DILASERVE = Path(sys.executable).with_name("dilaserve")

SLOW_MODULE = '''
"""A module that must not be imported for --help."""
raise RuntimeError("imported")

def slow(n: int) -> None:
    """Does something slow.

    With details.
    """
'''
QUICK_MODULE = '''
import typer

def quick(n: int) -> None:
    """Prints a number."""
    typer.echo(n + 1)
'''
GROUP_MODULE = '''
"""Two commands in one."""
raise RuntimeError("imported")

both = object()
'''


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    (tmp_path / "cli_test_slow.py").write_text(SLOW_MODULE)
    (tmp_path / "cli_test_quick.py").write_text(QUICK_MODULE)
    (tmp_path / "cli_test_group.py").write_text(GROUP_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return [
        EntryPoint("slow", "cli_test_slow:slow", GROUP),
        EntryPoint("quick", "cli_test_quick:quick", GROUP),
        EntryPoint("both", "cli_test_group:both", GROUP),
        EntryPoint("gone", "cli_test_no_such_module:gone", GROUP),
    ]


def invoke(commands: list[EntryPoint], *arguments: str) -> int:
    """Run a command group in this process; its exit code."""
    with pytest.raises(SystemExit) as caught:
        build_cli(commands)(arguments, prog_name="dilaserve")
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_imports_no_command(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(commands, "--help") == 0
    output = capsys.readouterr().out
    assert "slow   Does something slow." in output
    assert "both   Two commands in one." in output
    assert "gone" in output


def test_invoked_command_is_imported_and_runs(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(commands, "quick", "41") == 0
    assert capsys.readouterr().out == "42\n"


def test_unknown_command_is_a_usage_error(
    commands: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(commands, "quack") == 2
    assert "quack" in capsys.readouterr().err


def test_help_of_the_installed_cli_loads_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['dilaserve', '--help']\n"
        "from dilaserve.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(*{'torch', 'nats', 'httpx'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines()[-1] == ""
    for name in ("denoise", "replay", "up", "status", "generate", "doctor", "ping", "version"):
        assert f"  {name} " in output


def test_an_error_is_one_line_with_exit_code_1(tmp_path: Path) -> None:
    result = run(tmp_path, "up", "--model", "nowhere")
    assert result.returncode == 1
    assert result.stderr.startswith("dilaserve: model folder nowhere: it does not exist; give ")
    assert result.stderr.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run(tmp_path, "--debug", "up", "--model", "nowhere")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ModelFolderError" in result.stderr


def test_tensor_parallelism_without_a_planner_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "up", "--tp", "2")
    assert result.returncode == 1
    assert "add --planner apply, or set DILASERVE_TP_DEGREE=2" in result.stderr


@pytest.mark.parametrize("detached", [[], ["--detach"]])
def test_a_degree_that_does_not_divide_the_model_is_refused_at_once(
    tmp_path: Path, detached: list[str]
) -> None:
    result = run(tmp_path, "up", "--planner", "apply", "--tp", "16", *detached)
    assert result.returncode == 1
    assert "degree 16 does not divide the model's query heads (8); use a degree" in result.stderr
    assert "nats" not in result.stdout + result.stderr, "nothing was started"
    assert not (tmp_path / "valkey").exists()


def test_a_wrong_setting_of_a_worker_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILASERVE_MAX_BATCH_TOKENS", "many")
    result = run(tmp_path, "up")
    assert result.returncode == 1
    assert result.stderr.startswith("dilaserve: DILASERVE_MAX_BATCH_TOKENS='many'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--threads", "--workers", "--tp"])
def test_more_than_a_machine_holds_is_refused(tmp_path: Path, option: str) -> None:
    result = run(tmp_path, "up", option, "257")
    assert result.returncode == 2
    assert f"'{option}': Input should be less than or equal to 256" in result.stderr


def test_down_without_a_stack_says_so(tmp_path: Path) -> None:
    result = run(tmp_path, "down")
    assert (result.returncode, result.stdout) == (0, f"no stack runs in {tmp_path}\n")


def test_generate_without_a_gateway_says_how_to_start_one(tmp_path: Path) -> None:
    result = run(tmp_path, "generate", "hello", "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert "start a stack with `dilaserve up`" in result.stderr


usual_ports_free = pytest.mark.skipif(
    not (is_free("127.0.0.1", 4222) and is_free("127.0.0.1", 6379)),
    reason="a NATS or Redis runs at its usual port, and commands would find it",
)


@usual_ports_free
@pytest.mark.parametrize("command", ["ping gateway", "sub dlm.>", "replay some-id"])
def test_commands_without_a_stack_say_where_to_go(tmp_path: Path, command: str) -> None:
    result = run(tmp_path, *command.split())
    assert result.returncode == 1
    assert "no stack runs here; start one with `dilaserve up`, go to" in result.stderr
    assert result.stderr.count("\n") == 1, "no lines of the adapters' waiting"


@usual_ports_free
def test_status_without_a_stack_says_where_to_go(tmp_path: Path) -> None:
    result = run(tmp_path, "status")
    assert result.returncode == 1
    assert result.stdout.startswith("! nothing answers at nats://")
    assert "no stack runs here" in result.stdout
    assert result.stderr == ""


def test_address_that_was_given_is_blamed_itself(tmp_path: Path) -> None:
    result = run(tmp_path, "sub", "dlm.>", "--nats-url", "nats://127.0.0.1:9")
    assert result.returncode == 1
    assert result.stderr.startswith("dilaserve: no NATS server answers at nats://127.0.0.1:9 ")


def test_hints_name_a_command_that_the_shell_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(DILASERVE.parents[1])
    assert command_name() == "bin/dilaserve"
    monkeypatch.setenv("PATH", str(DILASERVE.parent))
    assert command_name() == "dilaserve"


def test_broken_pipe_ends_quietly() -> None:
    process = subprocess.Popen(
        [DILASERVE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=30)


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command with its state in `home`."""
    return subprocess.run(
        [DILASERVE, *arguments],
        env={**os.environ, "DILASERVE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
