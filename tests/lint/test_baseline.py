"""Findings in the baseline pass; new ones fail, and so does one that is gone and still listed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deadweight.audit.result import Audit
from deadweight.errors import DeadweightError
from deadweight.lint.baseline import Entry, read_baseline, write_baseline
from deadweight.lint.check import make_check
from deadweight.lint.settings import LintSettings, Target

A, B = Entry("m", "DW002", "k.bias", "dead", 8), Entry("m", "DW004", "x", "folds", 2, ((0, 1), (3, 4)))


def test_a_baseline_is_read_as_it_was_written_with_a_line_for_each_entry(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    write_baseline(file, [B, A, A])
    assert read_baseline(file) == {A, B}
    assert len(file.read_text().splitlines()) == 4
    write_baseline(file, [A, B])
    assert json.loads(file.read_text())["findings"][0]["parameter"] == "k.bias", "sorted: the order does not matter"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 7, "findings": []}',
        '{"format": 1, "findings": [{"x": 1}]}',
        '{"format": 1, "findings": ["k.bias"]}',
        '{"format": 1, "findings": [{"model": 1, "code": "DW002", "parameter": "k", "verdict": "dead", "dof": 1}]}',
    ],
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "known.json").write_text(text)
    with pytest.raises(DeadweightError, match=r"cannot be read .*--update-baseline"):
        read_baseline(tmp_path / "known.json")


def test_a_missing_baseline_says_how_to_write_it(project, run) -> None:
    code, _, err = run("audit", project.target, "--baseline", "known.json")
    assert code == 2 and "does not exist; --update-baseline writes it" in err


def test_old_findings_pass_new_ones_fail_and_gone_ones_fail(project, run) -> None:
    arguments = ("audit", project.target, "--baseline", "known.json")
    project.write(bias=False)
    assert run(*arguments, "--update-baseline")[0] == 0
    project.write(bias=True)
    code, out, _ = run(*arguments)
    assert code == 1 and "check: 1 finding fails" in out, "a new finding"
    assert run(*arguments, "--update-baseline")[0] == 0
    assert run(*arguments)[0] == 0, "an old finding"
    project.write(bias=False)
    code, out, _ = run(*arguments)
    assert code == 1 and "gone    DW002 k.bias" in out, "listed, and repaired"
    assert run(*arguments, "--update-baseline")[0] == 0
    assert run(*arguments)[0] == 0


def test_updating_without_a_file_is_refused(project, run) -> None:
    code, _, err = run("audit", project.target, "--update-baseline")
    assert code == 2 and "--baseline FILE" in err


def checked(audit: Audit, listed: set[Entry], **settings: object):
    return make_check([(Target("m"), audit)], LintSettings(**settings), frozenset(listed))  # type: ignore[arg-type]


def test_what_a_check_does_not_look_at_is_not_gone(gpt2_like: Audit) -> None:
    assert len(checked(gpt2_like, {A}).gone) == 1
    assert not checked(gpt2_like, {replace(A, model="another")}).gone, "another model"
    assert not checked(gpt2_like, {A}, select=("DW003",)).gone, "a law that is not selected"
    assert not checked(gpt2_like, {A}, ignore=("DW002",)).gone, "a law that is ignored"
    assert not checked(replace(gpt2_like, untraced="no graph"), {A}).gone, "a model that could not be audited"


def test_a_finding_that_grows_is_new(gpt2_like: Audit) -> None:
    first = gpt2_like.findings[0]
    listed = {Entry("m", f.code, f.parameter, f.verdict, f.dof, f.slice or ()) for f in gpt2_like.findings}
    assert not checked(gpt2_like, listed).failed
    larger = replace(gpt2_like, findings=(replace(first, dof=first.dof + 1), *gpt2_like.findings[1:]))
    result = checked(larger, listed)
    assert result.failing == 1 and len(result.gone) == 1
