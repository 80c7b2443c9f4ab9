"""The audit, stage by stage: open, trace, prove, test by evidence, account, report as findings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deadweight.audit.checker import structure
from deadweight.audit.finding import Audit, Finding, Unknown
from deadweight.audit.findings import everywhere_unknown, expand, to_finding
from deadweight.audit.measure import Measured, measure, untraced_evidence
from deadweight.audit.shorten import shortened
from deadweight.audit.unknowns import unknowns
from deadweight.errors import DeadweightError
from deadweight.graph.canonical import canonical, read_as_probabilities
from deadweight.graph.node import Graph
from deadweight.graph.trace import TraceError, trace
from deadweight.laws.catalogue import search
from deadweight.laws.claim import Claim
from deadweight.laws.prover import Prover
from deadweight.progress import Progress, silent
from deadweight.source.model import Source, open_model
from deadweight.source.real import with_values
from deadweight.threads import one_thread

TOLERANCE = 1e-9  # of the evidence: rounding leaves about 1e-14, a live direction gives about 1


def audit(
    model: Any,
    inputs: Any = None,
    *,
    training: bool = False,
    output: str = "logits",
    complete: bool = False,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    length: int | None = None,
    progress: Progress = silent,
) -> Audit:
    """Every parameter of the model that is dead, folds into others, or is a gauge, each with its proof.

    `model` is an nn.Module, or what the command line takes. `output` says what must stay the same: "logits" or
    "probabilities". With `complete`, all redundancy is counted on a narrow clone and compared with what is explained.
    """
    if output not in ("logits", "probabilities"):
        raise DeadweightError(f"found output={output!r}; expected 'logits' or 'probabilities'")
    options = {"training": training, "trust_remote_code": trust_remote_code, "length": length}
    with one_thread():
        result = staged(model, inputs, options, output, complete, progress)
    return chosen(result, select, ignore)


def staged(model: Any, inputs: Any, options: dict[str, Any], output: str, complete: bool, say: Progress) -> Audit:
    start = time.perf_counter()
    say("opening the model")
    source = open_model(model, inputs=inputs, collapsed=True, **options)
    if any(p.is_complex() for p in source.module.parameters()):
        raise DeadweightError(f"{source.name} has complex parameters; expected real ones")
    if not source.shapes:
        raise DeadweightError(f"{source.name} has no parameters; expected a module with something to audit")
    say("tracing")
    try:
        source, graph = shortened(*traced(source, model, inputs, options))
    except TraceError as error:
        return untraced(source, str(error), time.perf_counter() - start)
    if all(0 in graph.nodes[name].shape for name in graph.outputs):
        raise DeadweightError(
            f"{source.name} returns nothing for an empty batch; expected inputs of at least one sample"
        )
    graph = read_as_probabilities(graph) if output == "probabilities" else graph
    result = prove(source, graph, complete=complete, say=say)
    return replace(result, seconds=time.perf_counter() - start)


def traced(
    source: Source, model: Any, inputs: Any, options: dict[str, Any], *, pieces: bool = True
) -> tuple[Source, Graph]:
    """The graph of the collapsed model; of the whole one where the collapsed one cannot be traced."""
    try:
        return source, canonical(trace(source.module, source.args, source.kwargs), pieces=pieces)
    except TraceError:
        if (real := with_values(source)) is not None:
            return source, canonical(trace(real.module, real.args, real.kwargs), pieces=pieces)
        if not source.blocks:
            raise
    whole = open_model(model, inputs=inputs, collapsed=False, **options)
    return whole, canonical(trace(whole.module, whole.args, whole.kwargs), pieces=pieces)


@dataclass(frozen=True)
class Proved:
    """Claims that were found, that replay, and that the evidence bears out; and what became of the others."""

    prover: Prover
    measured: Measured
    claims: tuple[Claim, ...]
    contradicted: tuple[Claim, ...]
    refused: dict[int, str]  # claims by place, and the gap in the proof


def proved(source: Source, graph: Graph, *, complete: bool, say: Progress, evidence: bool = True) -> Proved:
    """Search for claims, replay every proof, and measure."""
    prover = search(graph, progress=say)
    say("replaying the proofs")
    refused = structure(graph, prover.claims)
    if evidence:
        say("looking for evidence")
    measured = measure(source, prover, complete=complete) if evidence else Measured(graph)
    kept = [c for i, c in enumerate(prover.claims) if i not in refused and not measured.refuses(c)]
    lost = tuple(c for c in kept if not (measured.evidence_of(c) or 0.0) <= TOLERANCE)
    return Proved(prover, measured, tuple(c for c in kept if not any(c is x for x in lost)), lost, refused)


def prove(source: Source, graph: Graph, *, complete: bool, say: Progress) -> Audit:
    """What is proved, in terms of the whole model."""
    found = proved(source, graph, complete=complete, say=say)
    prover, measured, refused = found.prover, found.measured, found.refused
    findings = [replace(to_finding(graph, c), evidence=measured.evidence_of(c)) for c in found.claims]
    lost = [to_finding(graph, c) for c in found.contradicted]
    unknown = [*everywhere_unknown(source, unknowns(prover)), *measured.unexplained]
    unknown += [Unknown(f.parameter, None, f"{f.code} was proved but the evidence contradicts it") for f in lost]
    for place, gap in refused.items():
        claim = prover.claims[place]
        unknown.append(Unknown(graph.parameters[claim.node], None, f"{claim.code}: the proof does not replay: {gap}"))
    return Audit(
        model=source.name,
        parameters=sum(torch.Size(shape).numel() for shape in source.shapes.values()),
        findings=tuple(expand(source, findings)),
        unknown=tuple(dict.fromkeys(unknown)),
        completeness=measured.completeness,
        untested=measured.untested,
        notes=(*source.notes, *graph.specialised, *measured.notes),
    )


def chosen(result: Audit, select: Sequence[str] | None, ignore: Sequence[str] | None) -> Audit:
    """Only the selected laws, without the ignored ones."""

    def wanted(finding: Finding) -> bool:
        names = {finding.code, finding.law}
        return (not select or bool(names & set(select))) and not (ignore and names & set(ignore))

    return replace(result, findings=tuple(f for f in result.findings if wanted(f)))


def untraced(source: Source, reason: str, seconds: float) -> Audit:
    """No graph, no proofs: what the gradients alone can say."""
    return Audit(
        model=source.name,
        parameters=sum(torch.Size(shape).numel() for shape in source.shapes.values()),
        findings=(),
        unknown=tuple(untraced_evidence(source)),
        untraced=reason,
        notes=source.notes,
        seconds=seconds,
    )
