"""The page of an audit: what is redundant, where, why, what to do; what is unknown; the account."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import PurePath

from deadweight.audit.result import Audit
from deadweight.laws.page import pages
from deadweight.report.advice import reduce_words
from deadweight.report.audit_rows import Doubt, Group, group_findings, group_unknown
from deadweight.report.html.layers import Layers, by_layer, spans_blocks
from deadweight.report.html.model_tree import draw_model
from deadweight.report.html.page import law_page, render_page, render_part, safe
from deadweight.report.html.remedy import reduce_command, remedy_of
from deadweight.report.html.rows import Packed, make_row, pack_findings
from deadweight.report.text import one_line

VERDICTS = ("dead", "folds", "gauge")
STATIC_ROWS = 100  # rows of the table that are there before the script runs
NOTEBOOK_ROWS, NOTEBOOK_STEPS = 60, 60
MOST_DOUBTS = 200  # rows of each table of unknowns


@dataclass(frozen=True)
class VerdictTotal:
    verdict: str
    dof: int
    n: int  # findings


@dataclass(frozen=True)
class LawTotal:
    """What one law adds, with its page."""

    code: str
    law: str
    title: str
    summary: str
    dof: int
    n: int
    share: float  # of the law with most dof
    parts: tuple[tuple[str, float], ...]  # verdict, and its part of this law's dof


@dataclass(frozen=True)
class Overview:
    """The first screen."""

    audit: Audit
    name: str
    headline: str
    verdicts: tuple[VerdictTotal, ...]
    laws: tuple[LawTotal, ...]
    layers: Layers
    notes: tuple[str, ...]
    blocked: tuple[Doubt, ...]
    unexplained: tuple[Doubt, ...]
    removable: str  # what `reduce` could do for a checkpoint: some findings it leaves
    command: str


def render_audit(audit: Audit) -> str:
    """The whole page."""
    groups = group_findings(audit.findings)
    packed = pack_findings(groups, audit)
    overview = make_overview(audit, groups)
    return render_page(
        "audit.html",
        title=f"{overview.name}: audit",
        view=overview,
        packed=packed,
        tree=draw_model(audit),
        static_rows=packed.rows[:STATIC_ROWS],
        law_pages={law.code: law_page(law.code) for law in overview.laws},
        left_out=left_out(packed),
        most_doubts=MOST_DOUBTS,
    )


def render_audit_fragment(audit: Audit) -> str:
    """The first screen and the table with its proofs, without a script, for a notebook."""
    groups = group_findings(audit.findings)
    shown = groups[:NOTEBOOK_ROWS]
    rows = [(make_row(g, audit), g.findings[0].proof[:NOTEBOOK_STEPS]) for g in shown]
    more = len(groups) - len(shown)
    return render_part("audit_fragment.html", view=make_overview(audit, groups), rows=rows, more=more)


def make_overview(audit: Audit, groups: list[Group]) -> Overview:
    doubts = group_unknown(audit.unknown)
    return Overview(
        audit=audit,
        name=model_name(audit.model),
        headline=headline_of(audit),
        verdicts=tuple(
            VerdictTotal(v, sum(g.dof for g in groups if g.verdict == v), sum(f.verdict == v for f in audit.findings))
            for v in VERDICTS
        ),
        laws=total_laws(groups),
        layers=by_layer(
            (("" if spans_blocks(f) else f.parameter, f.verdict, f.dof) for f in audit.findings),
            (name for name, _ in audit.shapes) if audit.shapes else (f.parameter for f in audit.findings),
        ),
        notes=tuple(one_line(note) for note in audit.notes),
        blocked=tuple(d for d in doubts if d.blocked_by is not None),
        unexplained=tuple(d for d in doubts if d.blocked_by is None),
        removable=reduce_words(audit.findings, audit.parameters).replace("`", ""),
        command=reduce_command(audit) if any(remedy_of(g, audit).command for g in groups) else "",
    )


def headline_of(audit: Audit) -> str:
    if not audit.findings and audit.unaudited is not None:
        return "Nothing is proved: this model could not be audited"
    if not audit.findings:
        return "No redundant parameter found"
    return f"{audit.redundant:,} of {audit.parameters:,} parameters are provably redundant"


def model_name(model: str) -> str:
    """The last part of a path; for a config, the folder that it lies in."""
    path = PurePath(model)
    return safe((path.parent.name if path.name == "config.json" else path.name) or model)


def total_laws(groups: list[Group]) -> tuple[LawTotal, ...]:
    """Laws, most dof first."""
    of_law: dict[tuple[str, str], list[Group]] = defaultdict(list)
    for g in groups:
        of_law[g.code, g.law].append(g)
    stored = {p.code: p for p in pages()}
    largest = max((sum(g.dof for g in gs) for gs in of_law.values()), default=0)
    totals = []
    for (code, law), gs in of_law.items():
        dof, page = sum(g.dof for g in gs), stored.get(code)
        parts = [(v, sum(g.dof for g in gs if g.verdict == v) / max(1, dof)) for v in VERDICTS]
        totals.append(
            LawTotal(
                code,
                law,
                page.title if page else law,
                page.summary if page else "",
                dof,
                sum(len(g.findings) for g in gs),
                dof / max(1, largest),
                tuple((v, part) for v, part in parts if part),
            )
        )
    return tuple(sorted(totals, key=lambda t: (-t.dof, t.code)))


def left_out(packed: Packed) -> tuple[str, ...]:
    """What did not fit into the page, in sentences."""
    sentences = []
    if packed.without_proof:
        sentences.append(f"{packed.without_proof:,} findings are listed without their proof")
    if packed.not_listed:
        sentences.append(f"{packed.not_listed:,} findings are not listed one by one")
    return tuple(sentences)
