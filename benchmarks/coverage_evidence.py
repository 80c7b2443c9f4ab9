"""What the gradients of a narrow clone say beside its proofs: biases without a gradient that no claim explains."""

from __future__ import annotations

from deadweight.audit.measure import Clone, Measured, drawer, take_evidence, widened
from deadweight.audit.path import on_path
from deadweight.audit.run import TOLERANCE
from deadweight.graph.trace import first_line
from deadweight.laws.prover import Prover
from deadweight.source.model import Source


def examined(prover: Prover, source: Source) -> dict[str, str]:
    """Parameter to what is not explained of it: no gradient and no proof, or a proof that the numbers contradict."""
    graph = prover.graph
    values = {name: widened(tensor) for name, tensor in graph.tensors.items()}
    clone = Clone(graph, prover, *on_path(graph, values, drawer(graph, source), source), "a narrow clone")
    measured = Measured(graph)
    try:
        take_evidence(source, clone, measured)
    except (RuntimeError, NotImplementedError) as error:  # an operation without a derivative or a float64 kernel
        return {"*": f"no evidence was taken: {first_line(error)}"}
    found = {unknown.parameter: unknown.why for unknown in measured.unexplained}
    if not measured.by_key and prover.claims:
        found["*"] = "no evidence was taken: gradients are not finite"
    for claim in prover.claims:
        if not (measured.evidence_of(claim) or 0.0) <= TOLERANCE:
            found[graph.parameters[claim.node]] = f"{claim.code} was proved but the evidence contradicts it"
    return found
