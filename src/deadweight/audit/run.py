"""The audit, stage by stage: open, trace, prove, test by evidence, account, report as findings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deadweight.audit.checker import structure
from deadweight.audit.finding import Audit, Finding, Unknown
from deadweight.audit.findings import everywhere_unknown, expand, to_finding
from deadweight.audit.measure import measure, untraced_evidence
from deadweight.audit.shorten import shortened
from deadweight.audit.unknowns import unknowns
from deadweight.claims.claim import Claim
from deadweight.errors import DeadweightError
from deadweight.graph.canonical import canonical, read_as_probabilities
from deadweight.graph.node import Graph
from deadweight.graph.trace import TraceError, trace
from deadweight.laws.catalogue import Catalogue, every_law
from deadweight.progress import Progress, silent
from deadweight.search.prover import Prover
from deadweight.source.kinds import ExampleInputs, ModelLike, Options
from deadweight.source.model import Source, open_model
from deadweight.source.real import with_values
from deadweight.threads import one_thread

TOLERANCE = 1e-9  # of the evidence: rounding leaves about 1e-14, a live direction gives about 1


def audit(
    model: ModelLike,
    inputs: ExampleInputs = None,
    *,
    training: bool = False,
    output: str = "logits",
    complete: bool = False,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    length: int | None = None,
    laws: Catalogue | None = None,
    progress: Progress = silent,
) -> Audit:
    """Every parameter of the model that is dead, folds into others, or is a gauge, each with its proof.

    `model` is an nn.Module, or what the command line takes. `output` says what must stay the same: "logits" or
    "probabilities". With `complete`, all redundancy is counted on a narrow clone and compared with what is explained.
    `laws` are those of the catalogue unless others are given.
    """
    if output not in ("logits", "probabilities"):
        raise DeadweightError(f"found output={output!r}; expected 'logits' or 'probabilities'")
    options = {"training": training, "trust_remote_code": trust_remote_code, "length": length}
    with one_thread():
        result = staged(model, inputs, options, Question(output, complete, laws or every_law()), progress)
    return chosen(result, select, ignore)


@dataclass(frozen=True)
class Question:
    """What is asked of a model: which output must stay, whether all redundancy is counted, and by which laws."""

    output: str
    complete: bool
    laws: Catalogue


def staged(model: ModelLike, inputs: ExampleInputs, options: Options, question: Question, say: Progress) -> Audit:
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
    graph = read_as_probabilities(graph) if question.output == "probabilities" else graph
    result = prove(source, graph, question, say)
    return replace(result, seconds=time.perf_counter() - start)


def traced(
    source: Source, model: ModelLike, inputs: ExampleInputs, options: Options, *, pieces: bool = True
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
    """The claims that were found and whose proofs cover all that reads a changed value; and what became of others."""

    prover: Prover
    claims: tuple[Claim, ...]
    refused: dict[int, str]  # claims by place, and the gap in the proof


def proved(graph: Graph, laws: Catalogue, say: Progress) -> Proved:
    """Search for claims, and check the structure of every proof."""
    prover = laws.search(graph, say)
    say("replaying the proofs")
    refused = structure(graph, prover.claims)
    return Proved(prover, tuple(c for i, c in enumerate(prover.claims) if i not in refused), refused)


def prove(source: Source, graph: Graph, question: Question, say: Progress) -> Audit:
    """What is proved, replayed on numbers and borne out by evidence, in terms of the whole model."""
    result = proved(graph, question.laws, say)
    say("looking for evidence")
    measured = measure(source, result.prover, question.laws, complete=question.complete)
    replayed = [c for c in result.claims if not measured.refuses(c)]
    lost = [c for c in replayed if not (measured.evidence_of(c) or 0.0) <= TOLERANCE]
    kept = [c for c in replayed if not any(c is other for other in lost)]
    findings = [
        replace(to_finding(graph, c), evidence=measured.evidence_of(c), unreplayed=measured.unreplayed_steps(c))
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
