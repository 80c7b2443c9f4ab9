"""Findings are grouped into rows without losing or doubling any."""

from __future__ import annotations

from dataclasses import replace

from deadweight.audit.result import Audit, Unknown
from deadweight.report.audit_rows import group_findings, group_unknown


def test_layers_and_heads_of_one_law_are_one_row(gpt2_like: Audit) -> None:
    rows = [(g.code, g.where, g.dof, len(g.findings)) for g in group_findings(gpt2_like.findings)]
    assert rows == [
        ("DW002", "h.0-1.attn.c_attn.bias[8:16]", 16, 2),
        ("DW003", "h.0-1.attn.c_attn.bias[16:24]", 16, 2),
        ("DW009", "h.0-1.attn.q.weight[0:8]", 64, 4),
    ]


def test_grouping_loses_and_doubles_no_finding(gpt2_like: Audit) -> None:
    grouped = [f for g in group_findings(gpt2_like.findings) for f in g.findings]
    assert sorted(grouped, key=repr) == sorted(gpt2_like.findings, key=repr)


def test_a_layer_with_another_slice_or_tier_gets_its_own_row(gpt2_like: Audit) -> None:
    first, second, *_ = gpt2_like.findings
    assert len(group_findings([first, replace(second, slice=((0, 8),))])) == 2
    assert len(group_findings([first, replace(second, tier="epsilon")])) == 2
    assert len(group_findings([first, second])) == 1


def test_dead_comes_before_folds_before_gauge_and_then_the_largest_law_first(gpt2_like: Audit) -> None:
    dead, _, folds, _, gauge, *_ = gpt2_like.findings
    larger = replace(dead, code="DW001", law="unused", parameter="old.weight", dof=9)
    assert [g.code for g in group_findings([gauge, folds, dead, larger])] == ["DW001", "DW002", "DW003", "DW009"]


def test_partners_collapse_like_parameters(gpt2_like: Audit) -> None:
    folds = group_findings(gpt2_like.findings)[1]
    assert [str(p) for p in folds.into] == ["h.0-1.attn.c_proj.bias"]


def test_the_evidence_of_a_row_is_its_worst(gpt2_like: Audit) -> None:
    first, second, *_ = gpt2_like.findings
    assert group_findings([first, replace(second, evidence=1e-12)])[0].evidence == 1e-12
    assert group_findings([replace(first, evidence=None)])[0].evidence is None


def test_unknowns_are_grouped_by_op_and_reason() -> None:
    unknown = [Unknown(f"h.{i}.k.bias", op, "why") for op in ("aten.cat.default", None) for i in range(3)]
    rows = [(str(d.pattern), d.blocked_by, d.why) for d in group_unknown(unknown)]
    assert rows == [("h.0-2.k.bias", "aten.cat.default", "why"), ("h.0-2.k.bias", None, "why")]
