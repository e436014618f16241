"""Recorded steps: what every denoising step did to a request, one JSON line each, for the step
predictor, the twin and the planner. Written by `dilaserve record` and from served traffic.

Knows no engine. A file whose writer was interrupted stays readable: a last line without its end is
left out, and cut off when the file is written on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from dilaserve.errors import DiLaServeError
from dilaserve.messages import CacheMode, ConfidenceStats, Count, FinishReason, StepKind

__all__ = [
    "RecordedStep",
    "RecordingError",
    "StepWriter",
    "complete_runs",
    "is_complete",
    "prompt_digest",
    "read_runs",
    "read_steps",
]


class RecordingError(DiLaServeError):
    """Recorded steps that cannot be read or written."""


class RecordedStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of one run: the state that it left, as in StepItemResult."""

    model_id: str
    prompt_id: str
    """The same for the same prompt at every threshold and length: training splits by it."""
    run_id: str
    """One denoising from start to end; a request's id where the steps were served."""
    n_output: Count
    """Canvas length in tokens."""
    block_length: Count
    step: Count
    """Number of the step, from 1, without gaps within a run."""
    kind: StepKind
    block: Count
    """Block that the step worked on, from 0."""
    n_unmasked: Count
    """Output tokens unmasked in all, after the step."""
    n_block_masked: Count
    """Positions of `block` still masked after the step."""
    threshold: float
    """That this step was run with; a run may change it from step to step."""
    confidence: ConfidenceStats
    """Over all output positions, those unmasked and those of later blocks included, each as of the
    last step that computed it; 0 for one never computed."""
    latency_ms: float
    """Of the pass that ran the step."""
    finish_reason: FinishReason | None = None
    """Set by the last step of a run, and by no other."""
    cache_mode: CacheMode | None = None
    """None where it was not noted: steps that were served, and older files."""


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """A name of a prompt that only the same token ids have."""
    return hashlib.sha256(array("i", prompt_ids).tobytes()).hexdigest()[:16]


class StepWriter:
    """Appends to a file; a context manager. Steps are on disk when `write` returns.

    Raises RecordingError when the file cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(path)
            self._file = path.open("ab", buffering=0)
            self.n_bytes = path.stat().st_size
            """Size of the file."""
        except OSError as error:
            raise RecordingError(_failed(path, "opened", error)) from error

    def write(self, steps: Iterable[RecordedStep]) -> None:
        """Append, in one piece; best called with all steps of a run at once."""
        data = self._encoder.encode_lines(list(steps))
        try:
            n_written = self._file.write(data)
        except OSError as error:
            raise RecordingError(_failed(self._path, "written", error)) from error
        if n_written != len(data):
            raise RecordingError(f"steps {self._path}: the disk is full; make room")
        self.n_bytes += n_written

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_steps(path: Path) -> Iterator[RecordedStep]:
    """All steps of a file in the order written. Raises RecordingError, naming file and line."""
    decode = msgspec.json.Decoder(RecordedStep).decode
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield _checked(decode(line))
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    raise RecordingError(
                        f"steps {path}, line {number}: {error}; remove that line, or record again"
                    ) from error
    except OSError as error:
        raise RecordingError(_failed(path, "read", error)) from error


def read_runs(paths: Iterable[Path]) -> list[list[RecordedStep]]:
    """The steps of each run in order, runs as they first appear, unfinished ones included. Files
    may hold runs interleaved; a run recorded again in a file from its first step replaces what that
    file had of it. In another file it is another run: ids repeat from recording to recording. A
    file that is given twice counts once."""
    runs: list[list[RecordedStep]] = []
    begun: dict[tuple[str, str], tuple[Path, list[RecordedStep]]] = {}
    for path in {path.resolve(): path for path in paths}.values():
        for step in read_steps(path):
            key = step.model_id, step.run_id
            began_in, run = begun.get(key, (None, []))
            if step.step == 1 and began_in == path:
                run.clear()
            elif step.step == 1 or began_in is None:
                run = []
                runs.append(run)
                begun[key] = path, run
            run.append(step)
    return runs


def complete_runs(path: Path) -> set[str]:
    """Ids of the runs that a file holds from start to end; none where there is no file."""
    if not path.exists():
        return set()
    return {run[0].run_id for run in read_runs([path]) if is_complete(run)}


def is_complete(run: Sequence[RecordedStep]) -> bool:
    """Whether a run has all its steps: numbered 1, 2, 3 … up to one with a finish reason, and all
    of one prompt and one size."""
    return (
        len(run) > 0
        and run[-1].finish_reason is not None
        and all(step.step == number for number, step in enumerate(run, 1))
        and len({(step.prompt_id, step.n_output, step.block_length) for step in run}) == 1
    )


def _checked(step: RecordedStep) -> RecordedStep:
    """Raises ValueError for a state that no canvas can have."""
    if not (step.n_output and step.block_length and step.step):
        raise ValueError(
            f"n_output {step.n_output}, block_length {step.block_length} and step {step.step} "
            "have to be at least 1"
        )
    size = min(step.block_length, step.n_output - step.block * step.block_length)
    if size < 1 or step.n_block_masked > size or step.n_unmasked > step.n_output:
        raise ValueError(
            f"block {step.block} with {step.n_block_masked} masked positions, and "
            f"{step.n_unmasked} tokens in all, are not of a canvas of {step.n_output} in blocks "
            f"of {step.block_length}"
        )
    return step


def _cut_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _failed(path: Path, what: str, error: OSError) -> str:
    return f"steps {path} cannot be {what}: {error.strerror}; give another file or mend its folder"
