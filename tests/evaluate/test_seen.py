"""An evaluation says whether the model was trained on the text, and refuses a text that is too short."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from deadweight.errors import DeadweightError
from deadweight.evaluate.run import Evaluation, evaluate
from deadweight.evaluate.seen import seen_share
from deadweight.report.audit_terminal import make_console
from deadweight.report.evaluation import print_evaluation

TEXT = b"the training text" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose record says that it was trained on TEXT."""
    record = {"text_bytes": len(TEXT), "text_sha256": hashlib.sha256(TEXT).hexdigest()}
    (tmp_path / "trained.json").write_text(json.dumps(record))
    return tmp_path


def test_the_training_text_is_recognised_and_another_text_is_not(folder: Path) -> None:
    held_out = b"and what was held out" * 10
    assert seen_share(str(folder), TEXT, len(TEXT)) == 1.0
    assert seen_share(str(folder), TEXT + held_out, len(TEXT + held_out)) == len(TEXT) / len(TEXT + held_out)
    assert seen_share(str(folder), TEXT + held_out, 20) == 1.0, "only the start of it is judged"
    assert seen_share(str(folder), held_out, len(held_out)) == 0.0


def test_without_a_record_nothing_is_said(tmp_path: Path) -> None:
    assert seen_share(str(tmp_path), TEXT, len(TEXT)) is None
    assert seen_share("demo", TEXT, len(TEXT)) is None


@pytest.mark.parametrize(("seen", "noted"), [(0.9, True), (0.0, False), (None, False)])
def test_the_report_says_so(seen: float | None, noted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    e = Evaluation("out", 1, 100, 100, 1.0, 1.0, 1.0, 1, 4)
    print_evaluation([replace(e, seen=seen)], make_console())
    assert ("out was trained on 90% of this text" in capsys.readouterr().out) is noted


def test_a_text_of_a_few_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("hi")
    with pytest.raises(DeadweightError, match=r"too short \(number of tokens: 2\); expected 32 tokens or more"):
        evaluate("demo", str(tmp_path / "short.txt"))
