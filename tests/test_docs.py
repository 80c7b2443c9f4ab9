"""Pages lead somewhere: each is in the index, and each file they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from deadweight.laws.page import pages
from deadweight.proof.verdict import Tier, Verdict

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md", "LOG.md", "CHANGELOG.md"))]
FILE = re.compile(
    r"(?<![\w/.-])((?:src|docs|studies|benchmarks|tests|scripts)/[\w./-]*\w\.(?:py|md|json|jsonl|svg|toml))\b"
)
TO_WRITE = {"tests/laws/test_cancelled.py"}  # what CONTRIBUTING tells its reader to create


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#:\s]+)\)", text_of(page))


def missing(page: Path) -> list[str]:
    """What a page links to, or names by its path from the root, and is not there."""
    broken = [link for link in links(page) if not (page.parent / link).exists()]
    return broken + [
        name for name in FILE.findall(text_of(page)) if not (ROOT / name).exists() and name not in TO_WRITE
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_or_names_exists(page: Path) -> None:
    assert missing(page) == []


def test_a_link_and_a_name_that_lead_nowhere_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[gone](gone.md), `docs/gone.md`, but [here](page.md) and `docs/index.md`")
    assert missing(page) == ["gone.md", "docs/gone.md"]


def test_every_page_is_in_the_index_once_and_readme_links_the_index() -> None:
    listed = sorted(re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", text_of(ROOT / "docs" / "index.md"), re.M))
    assert listed == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS if page.name != "index.md")
    assert "docs/index.md" in links(ROOT / "README.md")


def test_the_numbers_of_the_index_stand_on_the_pages_it_names() -> None:
    rows = re.findall(r"^\| \[([\w/-]+\.md)\].*\| (.+) \|$", text_of(ROOT / "docs" / "index.md"), re.M)
    assert len(rows) == len(DOCS) - 1
    stale = [
        (page, number)
        for page, verdict in rows
        for number in re.findall(r"\d+(?:[.,]\d+)*", verdict)
        if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![.,]?\d)", text_of(ROOT / "docs" / page))
    ]
    assert not stale, "index.md says something else than these pages"


NUMBER = re.compile(r"(?<![\w.,/×])\d+(?:[.,]\d+)*(?:e[-+]\d+)?(?![\w×])")


def test_the_numbers_of_the_advice_stand_on_the_pages_that_it_links() -> None:
    rows = [row for row in text_of(ROOT / "docs" / "choices.md").splitlines() if row.startswith("| ") and "](" in row]
    assert len(rows) >= 15
    stale = []
    for row in rows:
        pages_of_row = "".join(text_of(ROOT / "docs" / link) for link in re.findall(r"\]\(([^)]+)\)", row))
        stale += [
            n for n in NUMBER.findall(row) if not re.search(rf"(?<![\d.,]){re.escape(n)}(?![.,]?\d)", pages_of_row)
        ]
    assert not stale, "choices.md has numbers that no page of its row has"


def stale_numbers(readme: str) -> list[tuple[str, str]]:
    """Numbers before the link to a recorded page that are no number of this page, rounded."""
    stale = []
    for paragraph in re.sub(r"```.*?```", "", readme, flags=re.S).split("\n\n"):
        parts = re.split(r"\]\((docs/[\w-]+\.md)\)", paragraph)
        for before, page in zip(parts[::2], parts[1::2], strict=False):
            text = text_of(ROOT / page)
            if "benchmarks/" in text:
                stale += [(page, n) for n in NUMBER.findall(before) if not stands_rounded(n, text)]
    return stale


def stands_rounded(number: str, text: str) -> bool:
    """Whether the text has the number, or one with more digits that is rounded to it."""
    digits, exponent = number.replace(",", "").partition("e")[::2]
    style = f".{len(digits.partition('.')[2])}{'e' if exponent else 'f'}"
    numbers = re.findall(r"\d+(?:[.,]\d+)*(?:e[-+]\d+)?", text)
    whole = "." not in number and not exponent and len(digits) > 2
    if whole:  # a count is not rounded
        return number in numbers
    values = [float(n.replace(",", "")) for n in numbers if n.count(".") < 2]
    return format(float(number.replace(",", "")), style) in {format(v, style) for v in values}


def test_the_numbers_of_readme_stand_on_the_recorded_pages_that_it_links() -> None:
    readme = text_of(ROOT / "README.md")
    assert stale_numbers(readme) == []
    right = next(line for line in text_of(ROOT / "docs" / "modules.md").splitlines() if " get proofs.**" in line)
    count = right.strip("*").split()[0]
    wrong = readme.replace(f"{count} get proofs", f"{int(count) - 1} get proofs")
    assert stale_numbers(wrong) == [("docs/modules.md", str(int(count) - 1))]


def test_readme_counts_the_laws() -> None:
    assert f"The {len(pages())} laws" in text_of(ROOT / "README.md")


@pytest.mark.parametrize(
    ("report", "term"),
    [
        ("audit_terminal", "dof"),
        ("audit_terminal", "share"),
        ("audit_terminal", "verdict"),
        ("audit_terminal", "into"),
        ("audit_terminal", "blocked by"),
        ("audit_terminal", "evidence only"),
        ("audit_terminal", "unexplained"),
        ("audit_terminal", "unsound"),
        ("reduction", "noise floor"),
        ("reduction", "rounding grows"),
        ("reduction", "error in float64"),
        ("reduction", "tier"),
        ("reduction", "not done"),
        ("evaluation", "bits per byte"),
        ("evaluation", "same most likely token"),
        ("evaluation", "KL"),
        ("saturation", "slope"),
        ("saturation", "logit range"),
        ("saturation", "factor"),
        ("allocation", "bound"),
        ("allocation", "lag"),
        ("allocation", "profile"),
    ],
)
def test_a_term_that_a_report_prints_is_in_the_glossary(report: str, term: str) -> None:
    assert term.lower() in text_of(ROOT / "src" / "deadweight" / "report" / f"{report}.py").lower()
    assert re.search(rf"^\| {re.escape(term)}", text_of(ROOT / "docs" / "glossary.md"), re.M)


def test_the_glossary_has_every_verdict_and_tier() -> None:
    glossary = text_of(ROOT / "docs" / "glossary.md")
    assert all(re.search(rf"^\| {verdict} \|", glossary, re.M) for verdict in get_args(Verdict))
    assert all(f"*{tier}*" in glossary for tier in get_args(Tier))
