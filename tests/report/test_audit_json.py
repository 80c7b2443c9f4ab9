"""The JSON of an audit has the documented keys and the numbers of the audit."""

from __future__ import annotations

import json
from dataclasses import replace

import deadweight
from deadweight.audit.result import Audit, Unknown
from deadweight.report.audit_json import as_text, to_json


def test_the_report_has_exactly_the_documented_keys(gpt2_like: Audit) -> None:
    report = to_json(gpt2_like)
    assert list(report) == ["deadweight", "model", "parameters", "redundant", "findings", "unknown", "completeness"]
    assert list(report["findings"][0]) == [
        "code", "law", "parameter", "slice", "elements", "dof", "verdict", "into", "tier", "proof", "evidence",
        "unreplayed", "severity", "fix", "saves", "source",
    ]  # fmt: skip
    assert list(report["unknown"][0]) == ["parameter", "blocked_by", "why"]
    assert report["completeness"] == {"measured": 345, "explained": 345}


def test_the_numbers_are_those_of_the_audit(gpt2_like: Audit) -> None:
    report = to_json(gpt2_like)
    assert report["deadweight"] == deadweight.__version__
    assert (report["model"], report["parameters"], report["redundant"]) == ("tiny/gpt2", 1208, 96)
    first = report["findings"][0]
    assert (first["slice"], first["into"], first["evidence"]) == ([[8, 16]], [], 3.1e-16)


def test_the_report_survives_a_round_trip_through_text(gpt2_like: Audit) -> None:
    assert json.loads(as_text(to_json(gpt2_like))) == to_json(gpt2_like)


def test_a_whole_parameter_has_a_null_slice(gpt2_like: Audit) -> None:
    whole = replace(gpt2_like.findings[0], slice=None)
    assert to_json(replace(gpt2_like, findings=(whole,)))["findings"][0]["slice"] is None


def test_an_unexplained_zero_is_an_unknown_that_nothing_blocks(clean: Audit) -> None:
    report = to_json(replace(clean, unknown=(Unknown("x.bias", None, "gradient is zero"),)))
    assert report["unknown"] == [{"parameter": "x.bias", "blocked_by": None, "why": "gradient is zero"}]


def test_an_untraced_model_is_unknown_as_a_whole(clean: Audit) -> None:
    report = to_json(replace(clean, untraced="data-dependent branch"))
    assert report["unknown"] == [{"parameter": "*", "blocked_by": "torch.export", "why": "data-dependent branch"}]
    assert report["completeness"] is None


def test_evidence_that_is_not_a_number_is_null_so_that_the_text_stays_json(gpt2_like: Audit) -> None:
    for value in (float("nan"), float("inf"), None):
        audit = replace(gpt2_like, findings=(replace(gpt2_like.findings[0], evidence=value),))
        assert json.loads(as_text(to_json(audit)))["findings"][0]["evidence"] is None


def test_the_text_is_ascii_whatever_the_parameters_are_called(gpt2_like: Audit) -> None:
    odd = replace(gpt2_like.findings[0], parameter="\x1b[2J\x9bγ\udc80")
    text = as_text(to_json(replace(gpt2_like, findings=(odd,))))
    assert text.isascii()
    assert "\x1b" not in text
    assert json.loads(text)["findings"][0]["parameter"] == odd.parameter
