"""Points that are kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dilaserve.errors import DiLaServeError
from dilaserve_bench.experiments.ledger import Ledger, code_fingerprint


class Value(msgspec.Struct):
    x: float


class Other(msgspec.Struct):
    x: float


def test_found_again_by_key_and_type(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "points.jsonl"
    Ledger(path).keep({"b": 1, "a": 2}, Value(0.5))
    ledger = Ledger(path)
    assert ledger.find({"a": 2, "b": 1}, Value) == Value(0.5)
    assert ledger.find({"a": 2}, Value) is None
    assert ledger.find({"a": 2, "b": 1}, Other) is None


def test_what_is_missing_is_named_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "points.jsonl")
    ledger.keep({"a": 1}, Value(0.5))
    assert ledger.missing([{"a": 1}, {"a": 2}, {"a": 2}], Value) == [{"a": 2}]
    assert ledger.missing([{"a": 1}], Other) == [{"a": 1}]


def test_a_fresh_one_finds_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    Ledger(path).keep("a", Value(1.0))
    fresh = Ledger(path, is_fresh=True)
    assert fresh.find("a", Value) is None
    fresh.keep("a", Value(2.0))
    assert fresh.find("a", Value) == Value(2.0)
    assert Ledger(path).find("a", Value) == Value(2.0)


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    Ledger(path).keep("a", Value(1.0))
    path.write_bytes(path.read_bytes() + b'{"key": {"ki')
    assert Ledger(path).find("a", Value) == Value(1.0)


def test_what_comes_behind_a_line_that_was_cut_off_is_found(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    Ledger(path).keep("a", Value(1.0))
    path.write_bytes(path.read_bytes() + b'{"x":' + 100_000 * b"[")
    Ledger(path).keep("b", Value(2.0))
    assert Ledger(path).missing(["a", "b"], Value) == []


def test_what_is_not_of_its_type_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    Ledger(path).keep("a", Value(1.0))
    path.write_bytes(path.read_bytes().replace(b"1.0", b'"one"'))
    ledger = Ledger(path)
    assert ledger.find("a", Value) is None
    assert ledger.missing(["a"], Value) == ["a"]


def test_where_nothing_can_be_kept_nothing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "points.jsonl").mkdir()
    for path in (tmp_path / "file" / "points.jsonl", tmp_path / "points.jsonl"):
        with pytest.raises(DiLaServeError, match="set DILASERVE_HOME"):
            Ledger(path)


def test_fingerprint_is_of_sources_that_exist() -> None:
    assert code_fingerprint() == code_fingerprint()
    assert code_fingerprint(["dilaserve"]) != code_fingerprint(["dilaserve_bench"])
    assert code_fingerprint(["nobody_has_this"]) == code_fingerprint([])
