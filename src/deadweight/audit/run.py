"""The audit, stage by stage: open, trace, prove, test by evidence, account, report as findings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from deadweight.audit.checker import structure
from deadweight.audit.clone_measurements import measure
from deadweight.audit.evidence import TOLERANCE
from deadweight.audit.findings import everywhere_unknown, expand, to_finding
from deadweight.audit.payoff import payoff_of
from deadweight.audit.result import Audit, Finding, Opened, Unknown
from deadweight.audit.short_examples import shorten_example
from deadweight.audit.source_line import source_line
from deadweight.audit.unknowns import unknowns
from deadweight.audit.untraced_evidence import untraced_evidence
from deadweight.claims.claim import Claim
from deadweight.errors import DeadweightError
from deadweight.graph.canonical import canonical, read_as_probabilities
from deadweight.graph.node import Graph
from deadweight.graph.trace import TraceError, trace
from deadweight.laws.catalogue import Catalogue, every_law
from deadweight.progress import Progress, silent
from deadweight.search.prover import Prover
from deadweight.silence import without_jit_warnings
from deadweight.source.materialise import with_values
from deadweight.source.model import ModelSpec, Source
from deadweight.source.type_aliases import ExampleInputs, ModelLike
from deadweight.threads import one_thread


def audit(
    model: ModelLike,
    inputs: ExampleInputs = None,
    *,
    training: bool = False,
    output: str = "logits",
    complete: bool = False,
    select: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    trust_remote_code: bool = False,
    length: int | None = None,
    laws: Catalogue | None = None,
    progress: Progress = silent,
) -> Audit:
    """Every parameter of the model that is dead, folds into others, or is a gauge, each with its proof.

    `model` is an nn.Module, or what the command line accepts. `output` says what must stay the same: "logits" or
    "probabilities". With `complete`, all redundant dimensions are counted on a narrow clone and compared with those
    that the laws explain; if they cannot be counted, `uncounted` of the result says why. `select` and `ignore` are law
    codes or names. `laws` replaces the catalogue of all laws.
    """
    if output not in ("logits", "probabilities"):
        raise DeadweightError(f"found output={output!r}; expected 'logits' or 'probabilities'")
    laws = laws or every_law()
    wanted, unwanted = laws.codes(select), laws.codes(ignore)
    spec = ModelSpec(model, inputs, trust_remote_code, training, length)
    with one_thread():
        result = run_stages(spec, AuditRequest(output, complete, laws), progress)
    return select_findings(replace(result, opened=how_opened(spec)), wanted, unwanted)


def how_opened(spec: ModelSpec) -> Opened:
    written = isinstance(spec.inputs, str)
    return Opened(
        live=isinstance(spec.model, nn.Module),
        inputs=str(spec.inputs) if written else "",
        live_inputs=spec.inputs is not None and not written,
        trust_remote_code=spec.trust_remote_code,
    )


@dataclass(frozen=True)
class AuditRequest:
    """What to find out: which output must stay the same, whether to count all redundancy, and by which laws."""

    output: str
    complete: bool
    laws: Catalogue


def run_stages(spec: ModelSpec, request: AuditRequest, progress: Progress) -> Audit:
    start = time.perf_counter()
    progress("opening the model")
    source = spec.open(collapsed=True)
    if any(p.is_complex() for p in source.module.parameters()):
        raise DeadweightError(f"{source.name} has complex parameters; expected real ones")
    if not source.shapes:
        raise DeadweightError(f"{source.name} has no parameters; expected a module with parameters to audit")
    progress("tracing")
    try:
        source, graph = shorten_example(*trace_source(source, spec))
    except TraceError as error:
        return audit_untraced(source, str(error), time.perf_counter() - start)
    if all(0 in graph.nodes[name].shape for name in graph.outputs):
        raise DeadweightError(
            f"{source.name} returns empty tensors for its example inputs; expected inputs of at least one sample"
        )
    graph = read_as_probabilities(graph) if request.output == "probabilities" else graph
    result = make_audit(source, graph, request, progress)
    return replace(result, seconds=time.perf_counter() - start)


def trace_source(source: Source, spec: ModelSpec, *, pieces: bool = True) -> tuple[Source, Graph]:
    """The model and its graph; where the collapsed model cannot be traced, those of the whole one."""
    try:
        return source, canonical(trace(source.module, source.args, source.kwargs), pieces=pieces)
    except TraceError:
        if (real := with_values(source)) is not None:
            return source, canonical(trace(real.module, real.args, real.kwargs), pieces=pieces)
        if not source.blocks:
            raise
    whole = spec.open(collapsed=False)
    return whole, canonical(trace(whole.module, whole.args, whole.kwargs), pieces=pieces)


@dataclass(frozen=True)
class Proved:
    """The claims whose proofs cover all readers of a changed value, and those whose proofs do not."""

    prover: Prover
    claims: tuple[Claim, ...]
    refused: dict[int, str]  # claims by their number, and the gap in the proof


def prove_claims(graph: Graph, laws: Catalogue, progress: Progress) -> Proved:
    """Search for claims, and check the structure of every proof."""
    prover = laws.search(graph, progress)
    progress("replaying the proofs")
    refused = structure(graph, prover.claims)
    return Proved(prover, tuple(c for i, c in enumerate(prover.claims) if i not in refused), refused)


def make_audit(source: Source, graph: Graph, request: AuditRequest, progress: Progress) -> Audit:
    """The findings that are proved, replayed on numbers and confirmed by evidence, for all blocks of the model."""
    result = prove_claims(graph, request.laws, progress)
    progress("looking for evidence")
    with without_jit_warnings():
        measured = measure(source, result.prover, request.laws, complete=request.complete)
    replayed = [c for c in result.claims if not measured.refuses(c)]
    lost = [c for c in replayed if not (measured.evidence_of(c) or 0.0) <= TOLERANCE]
    kept = [c for c in replayed if not any(c is other for other in lost)]
    findings = [
        replace(
            to_finding(graph, c),
            evidence=measured.evidence_of(c),
            unreplayed=measured.unreplayed_steps(c),
            fix=request.laws.law_of(c).fix,
            source=source_line(source.module, graph, c.node),
            payoff=payoff_of(source, graph, c, request.laws.law_of(c)),
        )
        for c in kept
    ]
    unknown = [*everywhere_unknown(source, unknowns(result.prover)), *measured.unexplained]
    unknown += [
        Unknown(graph.parameters[c.node], None, f"{c.code} was proved but the evidence contradicts it") for c in lost
    ]
    for place, gap in result.refused.items():
        claim = result.prover.claims[place]
        unknown.append(Unknown(graph.parameters[claim.node], None, f"{claim.code}: the proof does not replay: {gap}"))
    return Audit(
        model=source.name,
        parameters=sum(torch.Size(shape).numel() for shape in source.shapes.values()),
        findings=tuple(expand(source, findings)),
        unknown=tuple(dict.fromkeys(unknown)),
        completeness=measured.completeness,
        untested=measured.untested,
        uncounted=measured.uncounted,
        notes=(*source.notes, *graph.specialised, *measured.notes),
        specialised="; ".join(graph.specialised) or None,
        shapes=tuple(source.shapes.items()),
    )


def select_findings(result: Audit, select: Sequence[str] | None, ignore: Sequence[str] | None) -> Audit:
    """Only the selected laws, without the ignored ones."""

    def wanted(finding: Finding) -> bool:
        names = {finding.code, finding.law}
        return (not select or bool(names & set(select))) and not (ignore and names & set(ignore))

    return replace(result, findings=tuple(f for f in result.findings if wanted(f)))


def audit_untraced(source: Source, reason: str, seconds: float) -> Audit:
    """Without a graph there are no proofs: only what gradients show."""
    return Audit(
        model=source.name,
        parameters=sum(torch.Size(shape).numel() for shape in source.shapes.values()),
        findings=(),
        unknown=tuple(untraced_evidence(source)),
        untraced=reason,
        notes=source.notes,
        seconds=seconds,
        shapes=tuple(source.shapes.items()),
    )
