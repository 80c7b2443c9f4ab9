"""The memory of compressing: the page is what its record says, and deeper models take little more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("compress_memory")


def test_the_page_is_what_the_record_says(bench: ModuleType) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "compress_memory.json").read_text(encoding="utf-8"))
    rows = [bench.Row(**row) for row in record["rows"]]
    assert bench.markdown(rows, record["setting"]) == (ROOT / "docs" / "compress-memory.md").read_text(encoding="utf-8")
    growth = (rows[-1].peak - rows[0].peak) / (rows[-1].layers - rows[0].layers)
    assert growth < 0.5 * bench.BLOCK  # the whole model in float32 would be 1.0, and was 2.0 with its copy


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
