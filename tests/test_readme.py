"""What README shows is what the commands print: its counts are asserted here, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import deadweight
from deadweight.laws.page import pages
from deadweight.report.audit_rows import group_findings
from deadweight.report.text import count

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SHOWN = README.split("```")[1]


def test_every_row_that_readme_shows_is_what_the_audit_counts() -> None:
    result = deadweight.audit("demo", complete=True)
    found = {(g.code, g.where): count(g.dof) for g in group_findings(result.findings)}
    rows = re.findall(r"^(DW\d{3}|     ) .*?(transformer\.\S+) +(?:dead|folds|gauge) \(\w+\) +([\d,]+)", SHOWN, re.M)
    assert len(rows) == 7
    code = ""
    for label, where, dof in rows:
        code = label.strip() or code
        assert found[code, where] == dof
    assert f"{count(result.redundant)} of {count(result.parameters)} dimensions are redundant" in SHOWN
    assert result.completeness is not None
    explained, measured = result.completeness.explained, result.completeness.measured
    assert f"The laws explain {explained} of {measured} redundant dimensions measured: complete" in SHOWN


def test_the_reduction_that_readme_shows_is_what_reduce_takes_out(tmp_path: Path) -> None:
    found = deadweight.reduce("demo", tmp_path / "slim")
    gone = found.parameters_before - found.parameters_after
    line = f"{count(found.parameters_before)} parameters → {count(found.parameters_after)}  ({count(gone)} gone, "
    assert line in SHOWN


def test_readme_fits_on_three_screens_and_its_links_lead_somewhere() -> None:
    root = Path(__file__).parents[1]
    assert len(README.splitlines()) <= 150
    files = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    for page in files:
        for link in re.findall(r"\]\(([^)#:\s]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_first_screen_shows_the_report_and_the_curve_of_the_cache() -> None:
    before_the_first_command = README.split("```")[0]
    assert re.findall(r"!\[[^\]]+\]\(([^)]+)\)", before_the_first_command) == [
        "docs/screenshots/audit.png",
        "docs/cache-curve.svg",
    ]


def test_the_page_of_laws_lists_every_law() -> None:
    page = (Path(__file__).parents[1] / "docs" / "laws.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (DW\d{3}) \| ([a-z-]+) \|", page, re.M)
    assert listed == [(p.code, p.law) for p in pages()]
