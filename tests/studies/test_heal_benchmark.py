"""The healing benchmark: its text is in the style of WikiText, and its numbers are those of the folder it judged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import deadweight
from deadweight.compress.calibration import token_windows
from deadweight.compress.run import opened

ROOT = Path(__file__).parents[2]
PAGE = """<page><title>{title}</title><revision><text xml:space="preserve">{text}</text></revision></page>"""
BODY = """'''Rivers''' carry [[water|fresh water]] for 1,234.5 well-known miles{{cite|x}}, and it's &quot;cold&quot; there; [http://a.b some say].
&lt;!-- gone --&gt;
== Where ==
* a list is left out, however long it may be, since nobody would read a list of this kind as prose in a book
The [[Image:map.png|thumb|a [[map]]]]second paragraph speaks of the mountains from which all of these rivers come down.
"""  # noqa: E501


@pytest.fixture(scope="module")
def bench(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("heal")


def test_articles_are_told_as_wikitext_does(bench: ModuleType, tmp_path: Path) -> None:
    pages = [("Rivers", BODY), ("Lakes", BODY.replace("Rivers", "Lakes")), ("Stream", "#REDIRECT [[Rivers]]")]
    dump, out, others = (tmp_path / n for n in ("dump.xml", "out.txt", "test.txt"))
    dump.write_text("\n".join(PAGE.format(title=t, text=x) for t, x in pages), encoding="utf-8")
    others.write_text(" \n = Lakes = \n \n Some text . \n", encoding="utf-8")
    done = CliRunner().invoke(bench.app, ["text", str(dump), str(out), "--without", str(others), "--words", "999"])
    assert done.exit_code == 0 and "1 articles left out" in done.output, done.output
    told = out.read_text(encoding="utf-8")
    assert " = Rivers = " in told and " = = Where = = " in told and "Lakes" not in told and "REDIRECT" not in told
    wanted = (
        'Rivers carry fresh water for 1 @,@ 234 @.@ 5 well @-@ known miles , and it \'s " cold " there ; some say .'
    )
    assert f" {wanted} " in told
    assert "list" not in told and "map" not in told and "gone" not in told and "second paragraph" in told
    assert CliRunner().invoke(bench.app, ["text", str(dump), str(out), "--words", "3"]).exit_code == 0
    assert out.read_text(encoding="utf-8").count("<unk>") > 20


def test_a_budget_is_judged_before_and_after_healing(bench: ModuleType, tmp_path: Path) -> None:
    text, file, folder = tmp_path / "text.txt", tmp_path / "heal.json", tmp_path / "healed"
    prose = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines() * 3)
    text.write_text(prose, encoding="utf-8")
    options = ["--calibrate", str(text), "--heal-text", str(text), "--judge", str(text), "--keep-kv", "0.25"]
    options += ["--seconds", "4", "--windows", "8", "--length", "64", "--judged", "4"]
    done = CliRunner().invoke(bench.app, ["run", "demo", *options, "--out", str(folder), "--json", str(file)])
    assert done.exit_code == 0, done.output
    record = json.loads(file.read_text(encoding="utf-8"))
    (row,) = record["rows"]
    assert (
        (row["steps"] == 0 or row["steps"] >= bench.TRIAL)
        and row["share"] <= 0.25
        and row["before"] > record["original"]
    )
    source, _ = opened("demo", None)
    windows = token_windows(source, "demo", str(text), 4, record["setting"]["window"])
    assert bench.loss_of(deadweight.load(folder).float().eval(), windows) == pytest.approx(row["after"], abs=1e-5)
    page = tmp_path / "healing.md"
    report = CliRunner().invoke(bench.app, ["report", str(file), str(file), "--markdown", str(page)])
    assert report.exit_code == 0, report.output
    assert page.read_text(encoding="utf-8").count(f"{math.expm1(row['after'] - record['original']):+.1%}") == 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**record, "setting": {**record["setting"], "torch": "0"}}), encoding="utf-8")
    assert CliRunner().invoke(bench.app, ["report", str(file), str(other)]).exit_code == 2
