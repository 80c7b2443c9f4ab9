"""Pages are complete, fetch nothing, and no name in a model can change what they do."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from torch import nn

import deadweight
from deadweight.audit.result import Audit, Opened, Unknown
from deadweight.laws.page import pages
from deadweight.reduce.run import reduce
from deadweight.report.html.audit_page import render_audit
from deadweight.report.html.page import change_text, law_page, safe, short_count
from deadweight.report.html.remedy import reduce_command
from deadweight.report.html.render import render_html

from .parts import CONFIGS, LIMIT, data_of

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "src" / "deadweight" / "report" / "html" / "templates"


def test_the_first_screen_says_how_much_is_redundant_by_verdict_law_and_layer(demo_audit: Audit) -> None:
    html = render_audit(demo_audit)
    assert "112,393 of 1,878,144 parameters are provably redundant" in html
    for total in ("4,872", "7,680", "99,841"):  # dead, folds, gauge
        assert f'<span class="number">{total}</span>' in html
    assert re.search(r"<b>DW009</b> query-key-basis.*?49,152", html, re.DOTALL)
    assert 'aria-label="dead by block: 4,616 in total, at most 1,154 in one block"' in html


def test_the_account_and_the_unknown_are_on_the_page(demo_audit: Audit, gpt2_like: Audit) -> None:
    assert "explain <b>345</b> of <b>345</b>" in render_audit(demo_audit)
    blocked = render_audit(gpt2_like)
    assert "<code>aten.cat.default</code>" in blocked
    assert "Nothing: no operation stood in the way" not in blocked


def test_a_model_without_findings_has_a_page(clean: Audit) -> None:
    html = render_audit(clean)
    assert "No redundant parameter found" in html
    assert 'id="table"' not in html


def test_a_model_that_could_not_be_traced_says_so(clean: Audit) -> None:
    untraced = dataclasses.replace(
        clean, untraced="data-dependent\ncontrol flow", unknown=(Unknown("w", None, "none"),)
    )
    html = render_audit(untraced)
    assert "Nothing is proved" in html
    assert "data-dependent control flow" in html


def test_a_page_names_no_address_and_loads_nothing(demo_audit: Audit) -> None:
    html = render_audit(demo_audit)
    assert re.findall(r'(?:src|href|action|data)="(?!#)[^"]*"', html) == []
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of SVG elements, which is not fetched
    assert "@import" not in html and "url(" not in html


def test_the_policy_allows_the_pages_own_script_alone(hostile_audit: Audit) -> None:
    html = render_audit(hostile_audit)
    scripts = re.findall(r"<script(?: [^>]*)?>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 2  # the packed findings, which are not run, and the script
    digest = base64.b64encode(hashlib.sha256(scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html


def test_hostile_names_stay_text(hostile_audit: Audit) -> None:
    for html in (render_audit(hostile_audit), hostile_audit._repr_html_()):
        assert "<img" not in html
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e]", html)
        assert "{{ 7 * 7 }}" in html  # a template in a name is not run
        assert len(html.encode()) < LIMIT
    packed = data_of(render_audit(hostile_audit))
    assert not any(re.search("[\x02-\x1f\u202e]", text) for text in packed["strings"])


def test_a_long_name_is_cut_in_the_middle() -> None:
    assert safe("a" * 300 + "z") == "a" * 120 + "…" + "a" * 119 + "z"
    assert safe("a" * 240) == "a" * 240


def test_every_law_has_its_page_in_html() -> None:
    for page in pages():
        assert law_page(page.code).startswith("<p>"), page.code
        assert "<h3>When it fails</h3>" in law_page(page.code)
    assert law_page("DW999") == ""


def test_reduce_saves_no_more_than_the_page_says(demo_audit: Audit) -> None:
    claimed: dict[str, int] = {}
    for row in data_of(render_audit(demo_audit))["rows"]:
        claimed[row["code"]] = claimed.get(row["code"], 0) + row["remedy"]["saves"]
    saved: dict[str, int] = {}
    for step in reduce("demo", dry_run=True).steps:
        saved[step.code] = saved.get(step.code, 0) + step.saves
    assert set(saved) == {code for code, n in claimed.items() if n}
    assert all(saved[code] <= claimed[code] for code in saved)
    assert claimed["DW014"] == 0  # reduce leaves it, and the page says why


def test_the_page_counts_what_reduce_can_remove_apart_from_what_is_redundant(demo_audit: Audit) -> None:
    saves = sum(f.payoff.parameters for f in demo_audit.findings if f.payoff is not None)
    assert saves < demo_audit.redundant, "the length of the stream is redundant, and reduce leaves it"
    text = render_audit(demo_audit)
    assert f"deadweight reduce removes at most {saves:,} (" in text
    assert "without these numbers" not in text


def test_the_command_quotes_the_model_and_takes_a_configs_folder() -> None:
    assert reduce_command(Audit("a b/config.json", 1, ()), "DW002") == "deadweight reduce 'a b' OUT --select DW002"
    assert reduce_command(Audit("gpt2", 1, ())) == "deadweight reduce gpt2 OUT"
    assert reduce_command(Audit("x; rm -rf y", 1, ())) == "deadweight reduce 'x; rm -rf y' OUT"


@pytest.mark.parametrize(
    ("opened", "command"),
    [
        (Opened(inputs="2x3x16x16"), "deadweight reduce m:f OUT --select DW002 --inputs 2x3x16x16"),
        (Opened(inputs="2x3; rm y"), "deadweight reduce m:f OUT --select DW002 --inputs '2x3; rm y'"),
        (Opened(trust_remote_code=True), "deadweight reduce m:f OUT --select DW002 --trust-remote-code"),
        (Opened(live=True), 'deadweight.reduce(model, "OUT", select=["DW002"])'),
        (Opened(live=True, inputs="2x3"), """deadweight.reduce(model, "OUT", select=["DW002"], inputs='2x3')"""),
        (Opened(live_inputs=True), """deadweight.reduce('m:f', "OUT", select=["DW002"], inputs=inputs)"""),
    ],
)
def test_the_command_opens_the_model_as_the_audit_did(opened: Opened, command: str) -> None:
    assert reduce_command(Audit("m:f", 1, (), opened=opened), "DW002") == command


def test_the_page_of_a_module_in_memory_shows_a_call_and_no_command_line() -> None:
    html = render_html(deadweight.audit(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3)), torch.randn(2, 8)))
    assert "deadweight.reduce(model, &#34;OUT&#34;, inputs=inputs)" in html
    assert "deadweight reduce Sequential" not in html


def test_numbers_read_well() -> None:
    assert [short_count(n) for n in (7, 1_878_144, 405_853_388_800)] == ["7", "1.88 M", "406 B"]
    assert [change_text(x) for x in (0.0123, -0.0123, -0.00001)] == ["+1.23 %", "−1.23 %", "0.00 %"]


def test_the_templates_are_in_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = settings["tool"]["setuptools"]["package-data"]["deadweight"]
    files = [f"report/html/templates/{f.name}" for f in TEMPLATES.iterdir()]
    assert len(files) > 5
    assert all(any(fnmatch(file, glob) for glob in globs) for file in files)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_of_a_config_weighs_less_than_a_megabyte(name: str, page_of_config: Callable) -> None:
    result, html = page_of_config(name)
    assert len(html.encode()) < LIMIT
    assert f"{result.redundant:,} of {result.parameters:,} parameters" in html
    assert len(data_of(html)["rows"]) > 0
