"""The command line: options reach the library, a user's mistake is one line, and JSON output is nothing but JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import deadweight
from deadweight.audit.result import Audit
from deadweight.errors import DeadweightError
from deadweight.laws.page import pages
from deadweight.progress import silent

Install = Callable[[object], list[dict]]


def test_audit_prints_the_report_and_exits_with_zero(run, fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(gpt2_like)
    code, out, err = run("audit", "tiny/gpt2")
    assert (code, err) == (0, "")
    assert "DW002  key-bias" in out


def test_the_options_reach_the_library_function(run, fake_audit: Install, clean: Audit) -> None:
    calls = fake_audit(clean)
    run("audit", "m", "--training", "--output", "probabilities", "--complete", "--select", "key-bias,DW003",
        "--ignore", "dw001", "--trust-remote-code", "--length", "7")  # fmt: skip
    assert calls == [
        {
            "model": "m",
            "inputs": None,
            "training": True,
            "output": "probabilities",
            "complete": True,
            "select": ("DW002", "DW003"),
            "ignore": ("DW001",),
            "trust_remote_code": True,
            "length": 7,
            "progress": silent,
        }
    ]


def test_by_default_remote_code_is_not_trusted_and_nothing_is_selected(run, fake_audit: Install, clean: Audit) -> None:
    calls = fake_audit(clean)
    run("audit", "m")
    (call,) = calls
    assert (call["trust_remote_code"], call["select"], call["ignore"], call["length"]) == (False, None, None, None)
    assert (call["training"], call["output"], call["complete"]) == (False, "logits", False)


def test_check_exits_with_one_on_findings_and_zero_without(run, fake_audit: Install, gpt2_like, clean) -> None:
    fake_audit(gpt2_like)
    assert run("audit", "m", "--check")[0] == 1
    fake_audit(clean)
    assert run("audit", "m", "--check")[0] == 0


def test_json_to_standard_output_is_nothing_but_json(run, fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(gpt2_like)
    code, out, _ = run("audit", "m", "--json", "-", "--check")
    assert code == 1
    assert json.loads(out)["redundant"] == 96


def test_json_to_a_file_comes_with_the_report(run, fake_audit: Install, gpt2_like: Audit, tmp_path: Path) -> None:
    fake_audit(gpt2_like)
    code, out, _ = run("audit", "m", "--json", str(tmp_path / "audit.json"))
    assert code == 0
    assert "DW002" in out
    assert json.loads((tmp_path / "audit.json").read_text())["model"] == "tiny/gpt2"


def test_a_json_file_that_cannot_be_written_is_refused_before_the_audit(run, fake_audit, clean, tmp_path) -> None:
    calls = fake_audit(clean)
    code, _, err = run("audit", "m", "--json", str(tmp_path / "missing" / "audit.json"))
    assert code == 2
    assert err.startswith("error: cannot write --json")
    assert "does not exist" in err
    assert "it is a folder" in run("audit", "m", "--json", str(tmp_path))[2]
    assert calls == []


def test_a_users_mistake_is_one_line_and_exit_status_two(run, fake_audit: Install) -> None:
    fake_audit(DeadweightError("found no \x1b[31m'x'[red],\nexpected a folder"))
    code, out, err = run("audit", "x")
    assert (code, out) == (2, "")
    assert err == "error: found no \\x1b[31m'x'[red], expected a folder\n"


def test_a_long_error_is_not_wrapped(run, fake_audit: Install) -> None:
    fake_audit(DeadweightError("word " * 60 + "end"))
    assert run("audit", "x")[2].count("\n") == 1


def test_an_unknown_law_is_a_users_mistake(run, fake_audit: Install, clean: Audit) -> None:
    fake_audit(clean)
    for arguments in (("explain", "DW999"), ("audit", "m", "--select", "DW999"), ("audit", "m", "--ignore", "DW999")):
        code, _, err = run(*arguments)
        assert code == 2
        assert err.startswith("error: no law is called 'DW999'")


@pytest.mark.parametrize(
    "arguments", [("audit",), ("frobnicate",), ("audit", "m", "--output", "x"), ("audit", "m", "--length", "0")]
)
def test_wrong_usage_exits_with_two_and_without_a_traceback(run, arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert "Traceback" not in err


def test_an_interrupt_exits_with_130_and_silently(run, fake_audit: Install) -> None:
    fake_audit(KeyboardInterrupt)
    code, out, err = run("audit", "m")
    assert (code, out.strip(), err.strip()) == (130, "", "")


def test_proofs_are_printed_on_request(run, fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(gpt2_like)
    assert "softmax over that axis removes it" not in run("audit", "m")[1]
    assert "softmax over that axis removes it" in run("audit", "m", "--proofs")[1]


def test_explain_shows_a_law_by_code_and_by_name(run) -> None:
    assert run("explain", "DW002") == run("explain", "key-bias")
    code, out, _ = run("explain", "DW002")
    assert code == 0
    assert "When it fails" in out


def test_explain_without_a_law_lists_all(run) -> None:
    out = run("explain")[1]
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("DW")]
    assert listed == [page.code for page in pages()]


def test_the_version_is_the_packages(run) -> None:
    assert run("--version") == (0, f"deadweight {deadweight.__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--help",), ("audit", "--help"), ("explain", "-h"), ("demo", "--help")])
def test_every_help_text_shows_an_example_that_starts_with_the_command(run, arguments: tuple[str, ...]) -> None:
    code, out, _ = run(*arguments)
    assert code == 0
    assert "  deadweight " in out


def test_demo_audits_and_reduces_the_embedded_model(run) -> None:
    code, out, _ = run("demo")
    assert code == 0
    assert "DW002" in out and "softmax" in out, "the audit, with proofs"
    assert re.search(r"[1-9][\d,]+ gone", out) and "error in float64" in out, "the reduction, checked"
    assert "deadweight audit YOUR_MODEL" in out


def test_a_terminal_that_cannot_print_greek_still_gets_a_report(gpt2_like: Audit, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = subprocess.run(
        [sys.executable, "-m", "deadweight", "explain", "DW006"], env=environment, capture_output=True
    )
    assert result.returncode == 0
    assert b"norm-affine" in result.stdout


@pytest.mark.parametrize("words", [["explain", "DW001"], ["audit", "a.b:c", "--inputs", "2x64x"]])
def test_help_explain_and_bad_inputs_import_no_torch(words: list[str]) -> None:
    script = (
        "import sys; from deadweight import cli\n"
        f"sys.argv = ['deadweight', *{words}]\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'slow imports'\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_stage_package_is_callable_whatever_was_imported_first(fake_audit: Install, clean: Audit) -> None:
    import deadweight.audit.result as finding
    from deadweight import audit

    calls = fake_audit(clean)
    assert deadweight.audit("m", (1,), training=True) is clean
    assert audit("n") is clean
    assert calls == [{"model": "m", "inputs": (1,), "training": True}, {"model": "n", "inputs": None}]
    assert finding.Audit is Audit is deadweight.Audit
    assert deadweight.audit.result is finding


def test_the_public_names_exist_and_others_do_not() -> None:
    assert deadweight.DeadweightError is DeadweightError
    assert all(getattr(deadweight, name) is not None for name in deadweight.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = deadweight.nonsense


def test_an_untraced_audit_can_still_be_checked(run, fake_audit: Install, gpt2_like: Audit) -> None:
    fake_audit(replace(gpt2_like, untraced="no"))
    code, out, _ = run("audit", "m", "--check")
    assert code == 1
    assert "EVIDENCE ONLY" in out


@pytest.mark.parametrize("reason", ["untraced", "untested"])
@pytest.mark.parametrize("options", [(), ("--check",)])
def test_what_could_not_be_audited_is_an_error_and_not_clean(
    run, fake_audit: Install, clean: Audit, reason: str, options: tuple[str, ...]
) -> None:
    fake_audit(replace(clean, **{reason: "no clone runs"}))
    code, out, err = run("audit", "m", *options)
    assert code == 2
    assert "nothing to remove" not in out and "could not be audited: no clone runs" in err


def test_what_is_too_large_to_be_counted_is_reported_all_the_same(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deadweight.audit.clone_measurements.COUNTABLE", 10)
    code, out, err = run("audit", "demo", "--complete", "--select", "key-bias")
    assert code == 2
    assert "DW002" in out
    assert "redundant dimensions were not counted" in err and "expected at most 10: build the model smaller" in err


def test_check_counts_what_the_assertion_counts(run, fake_audit: Install, gpt2_like: Audit) -> None:
    gauges = replace(gpt2_like, findings=tuple(f for f in gpt2_like.findings if f.verdict == "gauge"))
    fake_audit(gauges)
    assert gauges.findings and run("audit", "m", "--check")[0] == 0
    assert run("audit", "m", "--check", "--gauges")[0] == 1
