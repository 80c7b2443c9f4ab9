"""The report says what to do, what it saves, and when reducing a checkpoint is worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadweight.audit.result import Audit, Payoff, SourceLine
from deadweight.report.advice import in_units, savings, worth_of
from deadweight.report.audit_terminal import make_console, print_audit


def with_payoff(audit: Audit) -> Audit:
    """Every finding saves its dof, in float32."""
    findings = [replace(f, payoff=Payoff(f.dof, 4 * f.dof, 2 * f.dof), fix="write less") for f in audit.findings]
    return replace(audit, findings=tuple(findings))


@pytest.mark.parametrize(
    ("n", "words"), [(1, "1 byte"), (999, "999 bytes"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10**12, "1.0 TB")]
)
def test_bytes_have_units(n: int, words: str) -> None:
    assert in_units(n) == words


def test_a_saving_of_nothing_is_called_nothing() -> None:
    assert savings(Payoff()) == "nothing"
    assert savings(Payoff(1, 4, 0)) == "1 number, 4 bytes"
    assert savings(Payoff(8, 32, 16)) == "8 numbers, 32 bytes, 16 FLOPs per token"


@pytest.mark.parametrize(
    ("parameters", "word"), [(100_000, "not worth it"), (5_000, "a small gain"), (500, "worth trying")]
)
def test_the_word_on_reducing_follows_the_share(gpt2_like: Audit, parameters: int, word: str) -> None:
    audit = with_payoff(replace(gpt2_like, parameters=parameters))
    assert word in dict(worth_of(audit))["trained model"]


def test_a_model_without_findings_gets_no_advice_to_reduce(clean: Audit) -> None:
    assert worth_of(clean) == []


def test_the_report_has_one_fix_for_each_law_and_explains_dof(gpt2_like: Audit, capsys) -> None:
    print_audit(with_payoff(gpt2_like), make_console())
    out = capsys.readouterr().out
    laws = {(f.code, f.verdict) for f in gpt2_like.findings}
    assert out.count("write less") == len(laws) and "dof: degrees of freedom" in out
    assert "turned alike" not in out, "words of proofs are explained where proofs are shown"


def test_proofs_explain_the_words_that_they_use_and_no_others(gpt2_like: Audit, capsys) -> None:
    proof = ("attn, model.py:3 [softmax]: softmax ignores it → shifted equally along axis 3",)
    audit = replace(gpt2_like, findings=(replace(gpt2_like.findings[0], proof=proof),))
    print_audit(audit, make_console(), proofs=True)
    out = capsys.readouterr().out
    assert "the value changes by adding something" in out and "turned alike" not in out


def test_a_fix_names_the_lines_of_the_project_and_not_those_of_libraries(gpt2_like: Audit, capsys) -> None:
    inside, outside = str(Path.cwd() / "mine" / "model.py"), "/usr/lib/site-packages/theirs.py"
    environment = str(Path.cwd() / ".venv" / "lib" / "site-packages" / "theirs.py")
    dead = next(f for f in gpt2_like.findings if f.verdict == "dead")
    places = [(inside, 9), (inside, 3), (outside, 1), (environment, 1)]
    findings = tuple(replace(dead, source=SourceLine(file, line, "constructed")) for file, line in places)
    print_audit(with_payoff(replace(gpt2_like, findings=findings)), make_console())
    out = capsys.readouterr().out
    assert "at mine/model.py:3, 9" in out and "theirs.py" not in out
