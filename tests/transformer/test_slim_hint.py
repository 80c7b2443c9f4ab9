"""Plain transformers on a slim folder: one line says how to load it, and other reports stay as they are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import deadweight
from deadweight.slim.format import SIGN
from deadweight.transformer.slim_hint import LOGGER, SlimHint


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord(LOGGER, logging.WARNING, __file__, 1, message, (), None)


def test_a_slim_folder_is_refused_with_the_two_ways_to_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "slim")
    deadweight.reduce("demo", folder, select="key-bias")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, "transformers"), pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(folder)
    told = list({r.getMessage() for r in caplog.records if r.name == LOGGER})
    assert len(told) == 1 and "\n" not in told[0]
    assert f"deadweight.load({folder!r})" in told[0] and "trust_remote_code=True" in told[0]


def test_reports_of_other_folders_stay_as_they_are() -> None:
    other, slim = record("GPT2 LOAD REPORT from: x\nwte | MISSING"), record(f"LOAD REPORT from: x\n{SIGN} | UNEXPECTED")
    assert SlimHint().filter(other) and other.getMessage().endswith("MISSING")
    assert SlimHint().filter(slim) and slim.getMessage().startswith("'x' is a slim checkpoint of deadweight")
