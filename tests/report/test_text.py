"""Text for a terminal: escaped, on one line, wrapped without loss."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadweight.report.text import file_size, one_line, percent, printable, wrap_name


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("h.0.attn.bias", "h.0.attn.bias"),
        ("γ·x̂ − β", "γ·x̂ − β"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b2J", "\\x9b2J"),
        ("safe\u202eexe", "safe\\u202eexe"),
        ("\u2028", "\\u2028"),
        ("\udc80", "\\udc80"),
        ("[red]not markup[/red]", "[red]not markup[/red]"),
    ],
)
def test_printable_escapes_what_could_steer_a_terminal_and_nothing_else(raw: str, shown: str) -> None:
    assert printable(raw) == shown


@given(st.text(st.characters()))
def test_printable_text_has_no_control_or_format_character_and_is_stable(raw: str) -> None:
    shown = printable(raw)
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert printable(shown) == shown


def test_one_line_joins_lines_and_blanks() -> None:
    assert one_line("found  this,\n   expected\tthat\x07") == "found this, expected that\\x07"


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [
        (345, 1208, "29 %"),
        (52, 1000, "5.2 %"),
        (645_888, 124_439_808, "0.52 %"),
        (9_216, 124_439_808, "0.0074 %"),
        (1, 10**9, "<0.001 %"),
        (0, 7, "0 %"),
        (0, 0, "0 %"),
        (7, 7, "100 %"),
    ],
)
def test_a_share_has_two_digits_that_count(part: int, whole: int, shown: str) -> None:
    assert percent(part, whole) == shown


def test_a_long_name_breaks_before_a_dot_or_a_bracket() -> None:
    assert wrap_name("transformer.h.0-11.attn.c_attn.bias[768:1536]", 36) == [
        "transformer.h.0-11.attn.c_attn.bias",
        "  [768:1536]",
    ]


@given(st.text("ab.[]0", max_size=60), st.integers(4, 30))
def test_wrapping_a_name_loses_nothing_and_keeps_to_the_width(name: str, width: int) -> None:
    lines = wrap_name(name, width)
    assert lines[0] + "".join(line[2:] for line in lines[1:]) == name
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(("size", "shown"), [(7_510_000, "7.51 MB"), (100_000, "0.10 MB"), (4_352, "4.35 kB")])
def test_a_small_file_is_not_zero_megabytes(size: int, shown: str) -> None:
    assert file_size(size, 2) == shown
