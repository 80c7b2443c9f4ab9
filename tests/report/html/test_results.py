"""Every command that measures writes a page, from the values that it returns."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import deadweight
from deadweight.audit.result import Audit
from deadweight.cli.main import app
from deadweight.compress.cache_result import CacheCompression, CurvePoint
from deadweight.compress.result import Judgement
from deadweight.evaluate.run import Evaluation, Evaluations
from deadweight.report.html.plots import heat_map, line_plot, linear_ticks
from deadweight.report.html.render import render_html
from deadweight.saturation.run import Saturation
from deadweight.saturation.slopes import AtLength, Head, LayerSlopes
from deadweight.slim.format import CacheSpec, UnitRun

from .parts import HOSTILE, LIMIT

COMMANDS = {
    "audit": ("audit demo", "112,393 of 1,878,144 parameters are provably redundant"),
    "reduce": ("reduce demo --dry-run", "112,392 of 1,878,144 parameters would go"),
    "evaluate": ("evaluate demo --bytes 2000", "Perplexity "),
    "saturation": ("saturation demo --windows 2 --length 32 --rows 4", "of 12 heads saturate with length"),
    "compress": ("compress demo --curve --windows 2 --length 32", "sizes of the key-value cache, measured"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_writes_its_page(name: str, tmp_path: Path) -> None:
    words, headline = COMMANDS[name]
    file = tmp_path / "page.html"
    result = CliRunner().invoke(app, [*words.split(), "--html", str(file)])
    assert result.exit_code == 0, result.output
    html = file.read_text(encoding="utf-8")
    assert headline in re.sub(r"\s+", " ", html)
    assert len(html.encode()) < LIMIT
    assert "nan" not in re.sub(r"[a-z]+nan|nan[a-z]+", "", html.lower())


def test_a_page_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", "demo", "--html", str(tmp_path / "none" / "page.html")])
    assert result.exit_code != 0
    assert "cannot write --html" in str(result.exception)


def test_heads_that_are_made_smaller_have_a_page() -> None:
    result = deadweight.compress("demo", keep_attention=0.6, windows=2, length=32)
    html = render_html(result)
    assert "Dimensions of keys" in html
    assert f"{result.kv_before:,} → {result.kv_after:,}" in html


def evaluation(model: str, **other: float) -> Evaluation:
    return Evaluation(model, 100, 1000, 4000, 2.0, 50.0, 5.0, 64, 400, **other)


def test_two_evaluations_stand_side_by_side() -> None:
    html = render_html((evaluation("one"), evaluation("two", kl=1e-3, agreement=0.98)))
    assert "Perplexity 7.39 → 7.39 (0.00 %)" in html
    assert "model 1: one" in html and "model 2: two" in html
    assert "98.00%" in html


def large_saturation(layers: int, heads: int) -> Saturation:
    at = [AtLength(n, 4, 1 / n, -math.log(n), (0.0, 0.0, 0.0), 0.0, 3.0, 1.0, 0.5) for n in (4, 8, 16, 32, 64)]
    one = [Head(h, (h % 17) / 8 - 1, 0.01, None, 0.0, tuple(at)) for h in range(heads)]
    layer = LayerSlopes("attn", tuple(one))
    return Saturation("large", "text", (4, 8, 16, 32, 64), 2, 4, 0, (layer,) * layers)


def test_sixteen_thousand_heads_stay_below_a_megabyte() -> None:
    html = render_html(large_saturation(126, 128))
    assert "of 16,128 heads saturate" in html
    assert len(html.encode()) < LIMIT


def test_a_coded_cache_shows_its_bits_and_what_they_cost() -> None:
    spec = CacheSpec(4, 4, 16, 16, 0, 4, 2, 2, ((UnitRun(16, (6, 4, 2, 4)),),))
    judged = {"held-back text": Judgement(100, 0.01, "kl", 2.0, 2.01)}
    result = CacheCompression("m", 0.25, 1024, 512, (CurvePoint(0.25, 0.0, judged),), {"h.0": spec, "h.1": spec})
    html = render_html(result)
    assert "25.0 % of the bytes of a 16\u2011bit cache, +1.01 % perplexity" in html
    assert "Bits of keys" in html


def test_results_render_in_notebooks_without_a_script(demo_audit: Audit) -> None:
    both = deadweight.evaluate("demo", "embedded", limit=2048)
    spec = CacheSpec(4, 4, 16, 16, 0, 4, 2, 2, ((UnitRun(16, (6, 4, 2, 4)),),))
    judged = {"held-back text": Judgement(100, 0.01, "kl", 2.0, 2.01)}
    cache = CacheCompression("m", 0.25, 1024, 512, (CurvePoint(0.25, 0.0, judged),), {"h.0": spec})
    plan = deadweight.reduce("demo", dry_run=True)
    results = (demo_audit, plan, evaluation("one"), both, cache, large_saturation(2, 3))
    for result in results:
        html = result._repr_html_()
        assert html.lstrip().startswith('<div class="dw fragment">')
        assert "<script" not in html and "<html" not in html
    assert "112,393 of 1,878,144 parameters are provably redundant" in demo_audit._repr_html_()
    assert "the parameter is changed here" in demo_audit._repr_html_()


def test_print_shows_the_report_of_a_result_and_not_its_data(demo_audit: Audit) -> None:
    assert "112,393 of 1,878,144 dimensions are redundant: 6.0 %" in str(demo_audit)
    assert len(repr(demo_audit)) < 200 and "112,393" in repr(demo_audit)
    spec = CacheSpec(4, 4, 16, 16, 0, 4, 2, 2, ((UnitRun(16, (6, 4, 2, 4)),),))
    judged = {"held-back text": Judgement(100, 0.01, "kl", 2.0, 2.01)}
    cache = CacheCompression("m", 0.25, 1024, 512, (CurvePoint(0.25, 0.0, judged),), {"h.0": spec})
    results = (evaluation("one"), Evaluations([evaluation("one")]), cache, large_saturation(2, 3))
    for result, words in zip(results, ("perplexity", "perplexity", "costliest", "saturate"), strict=True):
        assert words in str(result) and "(" not in str(result).splitlines()[0].split(" ")[0]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_model_names_stay_text_on_every_page(name: str) -> None:
    html = render_html((evaluation(name),)) + evaluation(name)._repr_html_()
    assert html.count("<script") == 1 and "<img" not in html
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", html)


def test_a_heat_map_draws_every_known_number_once() -> None:
    drawn = heat_map("t", [[-1, 0, None], [1, 1, math.nan]], -1, 1, axes=("x", "y"), form="+.1f")
    assert drawn.paths == ((0, "M0 0h1v1h-1z"), (4, "M1 0h1v1h-1z"), (8, "M0 1h2v1h-2z"))
    assert (drawn.low, drawn.high, drawn.diverging) == ("−1.0", "+1.0", True)


def test_a_line_plot_leaves_out_what_a_logarithm_cannot_show() -> None:
    plot = line_plot("t", [("a", [1, 2, 4], [0.0, 1.0, 10.0])], x_label="x", y_label="y", log="xy")
    assert plot is not None
    assert len(plot.lines[0].dots) == 2
    assert line_plot("t", [("a", [1], [math.nan])], x_label="x", y_label="y") is None


def test_ticks_are_round_numbers_within_the_axis() -> None:
    assert linear_ticks(8.0, 51.8) == [20.0, 40.0]
    assert linear_ticks(0.0, 1.0) == [0.0, 0.5, 1.0]
