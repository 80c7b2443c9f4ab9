"""The table of an audit: what each row says, totals, notes, wrapping, and no control characters."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from deadweight.audit.result import Audit, Completeness, Unknown
from deadweight.report.audit_terminal import make_console, print_audit


def render(audit: Audit, width: int | None = None, **options: bool) -> str:
    file = io.StringIO()
    console = make_console(file) if width is None else Console(file=file, width=width, highlight=False, markup=False)
    print_audit(audit, console, **options)
    return file.getvalue()


def row_with(text: str, report: str) -> str:
    return next(line for line in report.splitlines() if text in line)


def test_a_row_says_code_law_parameters_verdict_tier_dof_and_share(gpt2_like: Audit) -> None:
    row = row_with("DW002", render(gpt2_like))
    assert row.split() == ["DW002", "key-bias", "h.0-1.attn.c_attn.bias[8:16]", "dead", "(real)", "16", "1.3", "%"]


def test_the_totals_add_up_by_verdict(gpt2_like: Audit) -> None:
    report = render(gpt2_like)
    assert "96 of 1,208 dimensions are redundant: 7.9 %" in report
    for total in ("16  dead", "16  folds", "64  gauge"):
        assert total in report


def test_partners_are_named_as_target_of_a_fold_or_companion_of_a_gauge(gpt2_like: Audit) -> None:
    report = render(gpt2_like)
    assert "into h.0-1.attn.c_proj.bias" in report
    assert "with h.0-1.attn.k.weight" in report


def test_a_condition_is_a_footnote_of_its_row(gpt2_like: Audit) -> None:
    report = render(gpt2_like)
    assert "folds (mode) [1]" in row_with("DW003", report)
    assert "[1]  eval only: attention dropout is off" in report


def test_unknowns_name_the_op_that_blocked(gpt2_like: Audit) -> None:
    row = row_with("h.0-1.rotary.k.bias", render(gpt2_like))
    assert row.split() == ["h.0-1.rotary.k.bias", "aten.cat.default", "rotary"]


def test_an_unexplained_zero_is_loud(clean: Audit) -> None:
    report = render(replace(clean, unknown=(Unknown("x.bias", None, "gradient is zero"),)))
    assert "UNEXPLAINED" in report
    assert "x.bias  gradient is zero" in report
    assert "Not proved" not in report


def test_completeness_says_whether_anything_is_left(gpt2_like: Audit) -> None:
    assert "explain 345 of 345 redundant dimensions measured: complete" in render(gpt2_like)
    partly = replace(gpt2_like, completeness=Completeness(measured=345, explained=340))
    assert "explain 340 of 345 redundant dimensions measured: 5 not explained" in render(partly)
    assert "UNSOUND" not in render(partly)
    unsound = replace(gpt2_like, completeness=Completeness(measured=345, explained=345, unsound=1))
    assert "UNSOUND: 1 claimed direction changed the output" in render(unsound)


def test_an_untraced_model_is_announced_as_evidence_only(clean: Audit) -> None:
    report = render(replace(clean, untraced="data-dependent\nbranch"))
    assert "EVIDENCE ONLY" in report
    assert "reason: data-dependent branch" in report


def test_a_model_without_findings_says_so(clean: Audit) -> None:
    report = render(clean)
    assert "No redundant parameter found." in report
    assert "nothing to remove" in report


def test_the_advice_is_the_remedy_of_the_largest_dead_law(gpt2_like: Audit) -> None:
    report = " ".join(render(gpt2_like).split())
    assert "next DW002 key-bias: Build the key projection with `bias=False`" in report
    assert "`deadweight explain DW002`" in report


def test_notes_are_shown(gpt2_like: Audit) -> None:
    assert "note  positions were read up to length 5" in render(gpt2_like)


def test_proofs_are_printed_once_per_row_and_only_on_request(gpt2_like: Audit) -> None:
    step = "the shift is constant along the key axis"
    assert step not in render(gpt2_like)
    report = render(gpt2_like, proofs=True)
    assert report.count(step) == 1
    assert "likewise for all 2 findings in h.0-1.attn.c_attn.bias[8:16]" in report
    assert "measured: changes the output 3.1e-16 times as much as a random change of all parameters" in report


def test_a_finding_without_proof_says_that_it_was_only_measured(gpt2_like: Audit) -> None:
    unproved = replace(gpt2_like.findings[0], proof=())
    assert "no proof, only measured" in render(replace(gpt2_like, findings=(unproved,)), proofs=True)


@pytest.mark.parametrize("width", [None, 200, 100, 80, 60])
def test_no_name_is_truncated_at_any_width(gpt2_like: Audit, width: int | None) -> None:
    name = "vision_model.encoder.a_module_with_a_rather_long_name.self_attention.key_projection.bias"
    report = render(replace(gpt2_like, findings=(replace(gpt2_like.findings[0], parameter=name),)), width)
    assert "…" not in report
    parameters = "".join(
        line[: line.find("  dead")].strip() if "  dead" in line else line.strip() for line in report.splitlines()
    )
    assert name in parameters.replace(" ", "")


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal(gpt2_like: Audit, width: int) -> None:
    assert max(map(len, render(gpt2_like, width, proofs=True).splitlines())) <= width


def test_a_piped_name_stays_on_one_line(gpt2_like: Audit) -> None:
    name = ".".join(["a_module_with_a_rather_long_name"] * 6)
    report = render(replace(gpt2_like, findings=(replace(gpt2_like.findings[0], parameter=name),)))
    assert name in row_with("DW002", report)


def test_long_proof_steps_wrap_when_piped(gpt2_like: Audit) -> None:
    talkative = replace(gpt2_like.findings[0], proof=("softmax ignores a constant " * 20,))
    report = render(replace(gpt2_like, findings=(talkative,), unknown=()), proofs=True)
    assert max(map(len, report.splitlines())) <= 100


def test_control_characters_and_markup_never_reach_the_terminal(gpt2_like: Audit) -> None:
    evil = "\x1b[31m\x9b\u202e[bold red]x[/bold red]:smile:\r\n"
    finding = replace(gpt2_like.findings[0], law=evil, parameter=evil, into=(evil,), proof=(evil,), note=evil)
    audit = replace(
        gpt2_like,
        model=evil,
        findings=(finding,),
        unknown=(Unknown(evil, evil, evil), Unknown(evil, None, evil)),
        completeness=Completeness(1, 1, clone=evil, by_law=((evil, 1),)),
        untraced=evil,
        notes=(evil,),
    )
    for width in (None, 60, 100):
        report = render(audit, width, proofs=True)
        assert not set(report) & set("\x1b\x9b\u202e\r")
    assert render(audit).count("[bold red]x[/bold red]:smile:") >= 10


def test_colour_is_for_terminals_and_no_color_turns_it_off(gpt2_like: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    def coloured() -> str:
        file = io.StringIO()
        print_audit(gpt2_like, Console(file=file, width=120, force_terminal=True, color_system="standard"))
        return file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mdead" in coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31mdead" not in coloured()
    assert "\x1b" not in render(gpt2_like)


def test_an_empty_model_is_reported_without_a_division(clean: Audit) -> None:
    assert "0 parameters" in render(replace(clean, parameters=0))
