"""Every law has a page of the same form, which is found by code or name."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from deadweight.errors import DeadweightError
from deadweight.laws.page import Page, find_page, law_codes, pages, parse_page, read_pages
from deadweight.report.audit_terminal import make_console, print_page

LAWS = {
    "DW001": "unused",
    "DW002": "key-bias",
    "DW003": "value-bias",
    "DW004": "bias-before-statistics",
    "DW005": "mean-before-layernorm",
    "DW006": "norm-affine",
    "DW007": "post-norm-shift",
    "DW008": "lost-direction",
    "DW009": "query-key-basis",
    "DW010": "value-output-basis",
    "DW011": "hidden-unit-scale",
    "DW012": "residual-basis",
    "DW013": "added-tables",
    "DW014": "scale-before-norm",
    "DW015": "whole-projection",
    "DW016": "logit-shift",
    "DW017": "biases-at-one-place",
    "DW018": "softmax-elsewhere",
    "DW019": "linear-chain",
    "DW020": "parallel-maps",
}
SECTIONS = ["What", "Why", "Example", "When it fails", "Safety", "What to do"]

each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: page.code)


def test_there_is_one_page_per_law() -> None:
    assert {page.code: page.law for page in pages()} == LAWS


@each_page
def test_a_page_has_all_its_sections_in_order_and_fits_a_screen(page: Page) -> None:
    assert re.findall(r"^## (.+)$", page.markdown, re.M) == SECTIONS
    assert 25 <= len(page.markdown.splitlines()) <= 45
    assert max(map(len, page.markdown.splitlines())) <= 120


@each_page
def test_a_page_sums_itself_up_and_says_its_tier_and_a_remedy(page: Page) -> None:
    assert page.summary.endswith(".")
    assert page.remedy.endswith(".")
    safety = page.markdown.partition("## Safety")[2]
    assert re.search(r"\*(bitwise|real|epsilon|mode)\*", safety)


@each_page
def test_the_example_of_a_page_is_python(page: Page) -> None:
    examples = re.findall(r"```python\n(.*?)```", page.markdown, re.S)
    assert examples
    for example in examples:
        compile(example, page.code, "exec")


@each_page
def test_a_page_refers_only_to_laws_that_exist(page: Page) -> None:
    assert set(re.findall(r"DW\d{3}", page.markdown)) <= set(LAWS)


@each_page
def test_a_page_renders(page: Page) -> None:
    file = io.StringIO()
    print_page(page, make_console(file))
    assert page.title in file.getvalue()
    assert max(map(cell_len, file.getvalue().splitlines())) <= 100


@pytest.mark.parametrize("word", ["DW002", "dw002", "key-bias", " Key-Bias "])
def test_a_page_is_found_by_code_or_name_in_any_case(word: str) -> None:
    assert find_page(word).code == "DW002"


def test_an_unknown_law_is_answered_with_its_neighbours() -> None:
    with pytest.raises(DeadweightError, match=r"no law is called 'key_bias': did you mean key-bias"):
        find_page("key_bias")
    with pytest.raises(
        DeadweightError, match=rf"no law is called 'zzz': `deadweight explain` lists all {len(LAWS)} laws"
    ):
        find_page("zzz")


def test_laws_are_selected_by_code_or_name_with_commas_or_repetition() -> None:
    assert law_codes(["dw002,value-bias", "DW009"]) == ("DW002", "DW003", "DW009")
    assert law_codes([]) is None
    with pytest.raises(DeadweightError, match="DW999"):
        law_codes(["DW002,DW999"])


def test_empty_words_between_commas_are_left_out_but_not_all_words() -> None:
    assert law_codes(["DW002, ,", ""]) == ("DW002",)
    with pytest.raises(DeadweightError, match="found ',' where laws were to be named"):
        law_codes([","])


def test_only_markdown_files_are_pages(tmp_path: Path) -> None:
    (tmp_path / "DW001.md").write_text(pages()[0].markdown, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no page", encoding="utf-8")
    assert read_pages(tmp_path) == pages()[:1]


def test_a_page_without_a_title_is_refused() -> None:
    with pytest.raises(AssertionError, match="page must begin with '# DWnnn law-name: title', found 'Key bias'"):
        parse_page("page", "Key bias\n\nNo more.")
