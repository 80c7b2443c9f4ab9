"""What the gradients of a narrow clone say beside its proofs: biases without a gradient that no claim explains."""

from __future__ import annotations

from deadweight.audit.choice_parameters import has_no_derivative
from deadweight.audit.claim_matching import identities
from deadweight.audit.clone_measurements import Clone, Measured, drawer, take_evidence, to_float64
from deadweight.audit.path_evidence import on_path
from deadweight.audit.result import Unknown
from deadweight.audit.run import TOLERANCE
from deadweight.audit.unknowns import unknowns
from deadweight.graph.trace import first_line
from deadweight.search.prover import Prover
from deadweight.source.model import Source

CHOICE = "it only decides a choice (which experts, codes or tokens): no gradient anywhere, and not dead"
NO_REASON = "no gradient in the narrow clone, and no law that says why"


def examined(prover: Prover, source: Source) -> dict[str, str]:
    """Parameter to what is not explained of it: no gradient and no proof, or a proof that the numbers contradict."""
    graph = prover.graph
    values = {name: to_float64(tensor) for name, tensor in graph.tensors.items()}
    clone = Clone(graph, prover, *on_path(graph, values, drawer(graph, source), source), "a narrow clone")
    measured = Measured(identities(prover.claims, graph, {}))
    try:
        take_evidence(source, clone, measured)
    except (RuntimeError, NotImplementedError) as error:  # an operation without a derivative or a float64 kernel
        return {"*": f"no evidence was taken: {first_line(error)}"}
    reasons = {unknown.parameter: in_words(prover, unknown) for unknown in measured.unexplained}
    if not measured.evidence and prover.claims:
        reasons["*"] = "no evidence was taken: gradients are not finite"
    for claim in prover.claims:
        if not (measured.evidence_of(claim) or 0.0) <= TOLERANCE:
            reasons[graph.parameters[claim.node]] = f"{claim.code} was proved but the evidence contradicts it"
    return reasons


def in_words(prover: Prover, unknown: Unknown) -> str:
    """Why nothing is claimed of a parameter without a gradient, where the graph tells."""
    node = prover.graph.node_of.get(unknown.parameter)
    if "no gradient" not in unknown.why or node is None:
        return unknown.why
    if has_no_derivative(prover.graph, node):
        return CHOICE
    blocked = next((u for u in unknowns(prover) if u.parameter == unknown.parameter and u.blocked_by), None)
    return NO_REASON if blocked is None else f"no gradient; the proof stops at {blocked.blocked_by}: {blocked.why}"
