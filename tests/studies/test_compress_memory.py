"""The memory of compressing: the page says what was measured, and a small model is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("compress_memory")


def test_the_page_says_what_was_measured(bench: ModuleType) -> None:
    peaks = {"measuring": 2.5e9, "judging": 2.0e9, "writing": 1.0e9}
    rows = [bench.Row(4, 300_000_000, peaks, 0.0), bench.Row(8, 500_000_000, {**peaks, "judging": 2.7e9}, 0.0)]
    page = bench.markdown(rows, {"windows": 8, "length": 256, "machine": "2 CPU cores", "torch": "2.13.0"})
    assert "**2.70 GB for 0.50 B parameters; each further block takes 50 MB.**" in page
    assert "| 8 | 500,000,000 | 2.00 | 2.70 | 135% | 2.50 | 2.70 | 1.00 |" in page


def test_a_small_model_is_measured(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, size in {"WIDTH": 64, "HIDDEN": 96, "HEADS": 4, "KEYS": 2, "VOCABULARY": 99}.items():
        monkeypatch.setattr(bench, name, size)
    bench.make(tmp_path / "model", 2)
    bench.child(tmp_path / "model", tmp_path / "out", 4, 32)
    row = bench.Row(2, *json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert row.parameters == 99 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 128) + 64
    assert row.peak > 0 and (tmp_path / "out" / "model.safetensors").is_file()
