"""A coded cache in the terminal: where the bits went, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deadweight.cli import app
from deadweight.compress.cache_result import CacheCompression, CurvePoint
from deadweight.compress.result import Judgement
from deadweight.report.cache import bar, mean_bits, plot_cache, print_cache, widths_of
from deadweight.slim.format import CacheSpec, UnitRun

UNITS = (UnitRun(8, (8, 4, 2, 2)), UnitRun(8, (4, 2, 4, 6)))
SPEC = CacheSpec(8, 4, 16, 16, 8, 4, 2, 2, (UNITS,))


def point(share: float, rise: float) -> CurvePoint:
    return CurvePoint(
        share, 0.01, {"a": Judgement(100, 0.02, "kl", 2.0, 2.0 + rise), "b": Judgement(9, 0.1, "kl", 3.0, 3.1)}
    )


def result(*points: CurvePoint) -> CacheCompression:
    return CacheCompression("model", 0.25, 1024, 4096, points, {"layers.0.attn": SPEC})


def printed(value: CacheCompression) -> str:
    console = Console(width=160, record=True, file=None)
    with console.capture() as capture:
        print_cache(value, console)
    return capture.get()


def test_widths_are_listed_with_zeros_for_what_is_not_stored() -> None:
    keys, values = (widths_of(SPEC, values=values) for values in (False, True))
    assert keys == [8] * 8 + [4] * 16 + [2] * 8 + [0] * 32 and values == [6] * 8 + [4] * 8 + [2] * 16 + [0] * 32
    assert mean_bits(keys) == pytest.approx(18 / 8) and bar(keys) == "███▄▄▄▄▄▄▂▂▂" + " " * 12


def test_the_report_has_bits_bytes_and_the_cost_on_every_text() -> None:
    text = printed(result(point(0.25, 0.05)))
    assert "layers.0.attn" in text and "███" in text
    assert "256 → 33 bytes per token; 25.0% of a 16-bit cache at 1,024 tokens, 4.00 bits" in text
    assert "a: perplexity 7.39 → 7.77 (+5.13%)" in text and "difference between the texts: 5.39%" in text
    assert "A coordinate is one number of a key or value" in text and "KL: Kullback-Leibler divergence" in text


def test_a_curve_is_a_table_of_sizes(tmp_path: Path) -> None:
    many = result(point(0.125, 0.2), point(0.25, 0.05))
    text = printed(many)
    assert "12.5%" in text and "25.0%" in text and "+22.14%" in text and "nothing was written" in text
    plot_cache(many, tmp_path / "curve.svg")
    plot_cache(result(point(0.25, 0.05)), tmp_path / "bits.svg")
    assert all((tmp_path / name).read_text().startswith("<?xml") for name in ("curve.svg", "bits.svg"))


def test_the_command_writes_a_model_a_picture_and_json(tmp_path: Path) -> None:
    out, picture, report = tmp_path / "out", tmp_path / "bits.svg", tmp_path / "report.json"
    command = ["compress", "demo", str(out), "--bits", "4", "--windows", "8", "--length", "64"]
    done = CliRunner().invoke(app, [*command, "--plot", str(picture), "--json", str(report)])
    assert done.exit_code == 0, done.output
    data = json.loads(report.read_text())
    assert data["cache"] == "coded" and data["budget"]["share"] <= 0.25 and picture.exists()
    assert json.loads((out / "deadweight.json").read_text())["caches"].keys() == data["caches"].keys()
    assert "with a coded key-value cache" in (out / "README.md").read_text()


@pytest.mark.parametrize("words", [["compress", "demo"], ["compress", "demo", "OUT", "--curve"]])
def test_a_model_is_written_or_a_curve_is_drawn(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
