"""Names of strangers are escaped and cut before they are printed."""

import pytest

from deadweight.source.printable import printable, reason


@pytest.mark.parametrize("bad", ["\x1b[2J", "\r", "\n", "\x07", "\u202e", "\x9b31m", "\ud800"])
def test_control_characters_never_reach_the_terminal(bad: str) -> None:
    shown = printable(f"layer{bad}weight")
    assert shown.isprintable() and shown.startswith("layer") and shown.endswith("weight")


def test_ordinary_names_are_left_alone() -> None:
    assert printable("model.layers.0.mlp.weight ü 模型") == "model.layers.0.mlp.weight ü 模型"


def test_endless_names_are_cut() -> None:
    assert len(printable("x" * 10_000)) == 300


def test_a_reason_is_one_line() -> None:
    assert reason(ValueError("first\n\n  second")) == "ValueError: first second"
