"""What one commit does to a canvas: the rules that both stores follow, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dilaserve.store.records import LOST_CONFIDENCE, MASKED, Commit, Delta

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Unmasked:
    """Tokens that a commit adds to the stored canvas."""

    positions: list[int]
    tokens: list[int]
    confidences: list[float]


def check_commit(commit: Commit) -> None:
    """Raise ValueError for a commit that no stored state could make right."""
    positions, tokens = commit.positions, commit.tokens
    lengths = len(positions), len(tokens), len(commit.confidences)
    if not lengths[0] == lengths[1] == lengths[2]:
        raise _malformed(commit, f"positions, tokens and confidences have lengths {lengths}")
    if commit.epoch < 1 or commit.step < 1:
        raise _malformed(commit, f"epoch {commit.epoch} and step {commit.step} start at 1")
    if positions and (positions[0] < 0 or positions != sorted(set(positions))):
        raise _malformed(commit, f"positions {positions} are not ascending from 0")
    if tokens and not 0 <= min(tokens) <= max(tokens) <= _INT32_MAX:
        raise _malformed(commit, f"tokens {tokens} are not all token ids")
    if commit.canvas is not None:
        _check_canvas(commit, commit.canvas)


def unmask(stored: Sequence[int], commit: Commit) -> Unmasked | None:
    """What the commit adds to the stored canvas: its positions or, where it carries the whole
    canvas, every position that the stored one lacks. None when it would change a committed token.
    Raises ValueError when it reaches outside of the canvas."""
    if commit.canvas is not None:
        return _unmask_canvas(stored, commit, commit.canvas)
    if commit.positions and commit.positions[-1] >= len(stored):
        raise outside(commit)
    if any(stored[position] != MASKED for position in commit.positions):
        return None
    return Unmasked(commit.positions, commit.tokens, commit.confidences)


def outside(commit: Commit) -> ValueError:
    """The error of a commit that does not fit the stored canvas."""
    return _malformed(commit, "it reaches outside of the stored canvas or has another length")


def to_delta(commit: Commit, added: Unmasked) -> Delta:
    """The stream entry of a commit."""
    return Delta(
        step=commit.step,
        epoch=commit.epoch,
        block=commit.block,
        kind=commit.kind,
        threshold=commit.threshold,
        worker=commit.worker,
        latency_ms=commit.latency_ms,
        positions=added.positions,
        tokens=added.tokens,
        confidences=added.confidences,
        cache_mode=commit.cache_mode,
        rebuilt=commit.rebuilt,
        finish_reason=commit.finish_reason,
    )


def _unmask_canvas(stored: Sequence[int], commit: Commit, canvas: Sequence[int]) -> Unmasked | None:
    if len(canvas) != len(stored):
        raise outside(commit)
    if any(s not in (MASKED, c) for s, c in zip(stored, canvas, strict=True)):
        return None
    known = dict(zip(commit.positions, commit.confidences, strict=True))
    positions = [i for i, s in enumerate(stored) if s == MASKED and canvas[i] != MASKED]
    return Unmasked(
        positions,
        [canvas[i] for i in positions],
        [known.get(i, LOST_CONFIDENCE) for i in positions],
    )


def _check_canvas(commit: Commit, canvas: Sequence[int]) -> None:
    if not all(token == MASKED or 0 <= token <= _INT32_MAX for token in canvas):
        raise _malformed(commit, "its canvas holds something that is no token id")
    pairs = zip(commit.positions, commit.tokens, strict=True)
    if any(p >= len(canvas) or canvas[p] != token for p, token in pairs):
        raise _malformed(commit, "its canvas lacks the tokens of this step")


def _malformed(commit: Commit, what: str) -> ValueError:
    return ValueError(
        f"commit of {commit.request_id} epoch {commit.epoch} step {commit.step}: {what}; "
        "this is a bug of the worker that sent it"
    )
