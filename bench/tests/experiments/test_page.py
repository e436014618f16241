"""Pages as text and as markdown."""

from __future__ import annotations

from dilaserve_bench.experiments.page import (
    Page,
    Table,
    as_markdown,
    as_text,
    interval,
    number,
    percent,
    points,
)

PAGE = Page([Table(("policy", "rate"), [["a", "1.5"], ["longer|", "22.75"]], "Title")], ["A note."])


def test_text_is_aligned() -> None:
    assert as_text(PAGE, is_quick=False, is_complete=True).splitlines() == [
        "Title",
        "policy    rate",
        "a          1.5",
        "longer|  22.75",
        "",
        "A note.",
    ]


def test_text_warns_of_what_proves_nothing() -> None:
    lines = as_text(PAGE, is_quick=True, is_complete=False).splitlines()
    assert lines[:2] == [
        "QUICK: this tries the plumbing and shows nothing",
        "INCOMPLETE: it was interrupted",
    ]


def test_markdown_is_a_table_with_harmless_bars() -> None:
    assert as_markdown(PAGE).splitlines() == [
        "**Title**",
        "",
        "| policy | rate |",
        "| --- | --- |",
        "| a | 1.5 |",
        "| longer\\| | 22.75 |",
        "",
        "- A note.",
    ]


def test_cells() -> None:
    assert (number(0.12345), number(None), number(2.0, 1)) == ("0.123", "", "2.0")
    assert (percent(0.123), percent(None)) == ("12.3 %", "")
    assert (interval(0.5, 0.01), interval(0.5, None), interval(None, 0.1)) == (
        "0.500 ± 0.010",
        "0.500",
        "",
    )
    assert (points(0.9, 0.95), points(None, 0.5), points(0.5, None)) == ("-5.0", "", "")
