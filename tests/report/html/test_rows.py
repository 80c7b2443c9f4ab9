"""Findings are packed without loss while they fit, and what does not fit is counted."""

from __future__ import annotations

import dataclasses

from deadweight.audit.result import Audit
from deadweight.report.html.audit_page import render_audit
from deadweight.report.html.rows import NEXT, OWN, address, block_number, mark_block, safe_line

from .parts import LIMIT, data_of


def steps_of(data: dict, finding: list) -> list[tuple]:
    block, walk = finding[5], finding[6]

    def text(i: int) -> str:
        return data["strings"][i].replace(OWN, str(block)).replace(NEXT, str(block + 1))

    return [
        (text(op), text(node), text(rule), text(then), tuple(reads), tuple(text(p) for p in parameters))
        for op, node, rule, then, reads, parameters in data["walks"][walk]
    ]


def test_every_finding_of_the_demo_is_on_its_page_with_its_own_proof(demo_audit: Audit) -> None:
    data = data_of(render_audit(demo_audit))
    packed = {f[7]: steps_of(data, f) for row in data["rows"] for f in row["findings"]}
    for f in demo_audit.findings:
        expected = [(v.op, v.node, safe_line(v.rule), safe_line(v.conclusion), v.reads, v.parameters) for v in f.walk]
        assert packed[address(f)] == expected
    assert len(packed) == len(demo_audit.findings)


def test_findings_with_the_same_address_are_numbered(demo_audit: Audit) -> None:
    first = demo_audit.findings[0]
    twice = dataclasses.replace(demo_audit, findings=(first, dataclasses.replace(first, dof=1)))
    addresses = [f[7] for row in data_of(render_audit(twice))["rows"] for f in row["findings"]]
    assert addresses == [address(first), f"{address(first)}~2"]


def test_equal_proofs_of_repeated_blocks_are_stored_once(demo_audit: Audit) -> None:
    data = data_of(render_audit(demo_audit))
    key_biases = next(row for row in data["rows"] if row["code"] == "DW002")
    assert len(key_biases["findings"]) == 4
    assert len({f[6] for f in key_biases["findings"]}) < 4


def test_a_mark_takes_the_place_of_block_numbers_and_of_nothing_else() -> None:
    assert mark_block("h.3.attn.3.bias and h.4.ln", 3) == f"h.{OWN}.attn.{OWN}.bias and h.{NEXT}.ln"
    assert mark_block("h.33.attn, step 3", 3) == "h.33.attn, step 3"
    assert mark_block("h.3.attn", -1) == "h.3.attn"
    assert mark_block("h.3, model.py:3", 3) == f"h.{OWN}, model.py:3"


def test_a_finding_ends_with_its_line_of_code(demo_audit: Audit) -> None:
    data = data_of(render_audit(demo_audit))
    lines = {f[8] for row in data["rows"] for f in row["findings"]}
    assert lines == {f"{f.source.role} at {f.source}" for f in demo_audit.findings if f.source is not None}


def test_a_finding_outside_of_blocks_has_no_block_number(demo_audit: Audit) -> None:
    numbers = {f.parameter: block_number(f) for f in demo_audit.findings}
    assert numbers["transformer.wpe.weight"] == -1
    assert numbers["transformer.h.2.ln_1.bias"] == 2


def test_twenty_thousand_findings_stay_below_a_megabyte(many_alike: str, many_different: str) -> None:
    assert len(many_alike.encode()) < LIMIT
    assert len(many_different.encode()) < LIMIT


def test_findings_that_collapse_are_all_listed_with_proofs(many_alike: str) -> None:
    findings = [f for row in data_of(many_alike)["rows"] for f in row["findings"]]
    assert len(findings) == 20_000
    assert all(f[6] >= 0 for f in findings)
    assert "below 1 MB" not in many_alike


def test_what_does_not_fit_is_counted_on_the_page(many_different: str) -> None:
    findings = [f for row in data_of(many_different)["rows"] for f in row["findings"]]
    without = sum(f[6] < 0 for f in findings)
    assert 0 < without < len(findings) == 20_000
    assert f"{without:,} findings are listed without their proof" in many_different


def test_a_proof_without_a_graph_is_a_chain_of_its_lines(demo_audit: Audit) -> None:
    first = demo_audit.findings[0]
    plain = dataclasses.replace(demo_audit, findings=(dataclasses.replace(first, walk=()),))
    data = data_of(render_audit(plain))
    steps = steps_of(data, data["rows"][0]["findings"][0])
    assert [rule for _, _, rule, _, _, _ in steps] == [safe_line(line) for line in first.proof]
    assert [reads for *_, reads, _ in steps] == [(), *((i,) for i in range(len(first.proof) - 1))]
