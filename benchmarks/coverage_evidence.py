"""What the gradients of a narrow clone say beside its proofs: biases without a gradient that no claim explains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deadweight.audit.choice_parameters import has_no_derivative
from deadweight.audit.claim_matching import identities
from deadweight.audit.clone_measurements import Clone, Measured, drawer, take_evidence, to_float64
from deadweight.audit.path_evidence import on_path
from deadweight.audit.result import Unknown
from deadweight.audit.run import TOLERANCE
from deadweight.audit.unknowns import unknowns
from deadweight.claims.point import Point, Values
from deadweight.graph.node import Graph, Node
from deadweight.graph.trace import first_line
from deadweight.search.prover import Prover
from deadweight.source.model import Source

CHOICE = "it only decides a choice (which experts, codes or tokens): no gradient anywhere, and not dead"
ZEROS = "it only multiplies zeros on these inputs (zero again with other inputs and other parameters)"
PRODUCTS = {"linear", "aten.mul", "aten.mm", "aten.bmm", "aten.matmul"}  # zero if one factor is
SEEDS = (5, 6)  # of the inputs at which a factor has to be zero
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
    points = points_of(clone) if measured.unexplained else []
    reasons = {unknown.parameter: in_words(prover, unknown, points) for unknown in measured.unexplained}
    if not measured.evidence and prover.claims:
        reasons["*"] = "no evidence was taken: gradients are not finite"
    for claim in prover.claims:
        if not (measured.evidence_of(claim) or 0.0) <= TOLERANCE:
            reasons[graph.parameters[claim.node]] = f"{claim.code} was proved but the evidence contradicts it"
    return reasons


def points_of(clone: Clone) -> list[Point]:
    """Two inputs, each with two sets of parameters; none for a trace on given values, which is that of one path."""
    graph, values = clone.graph, clone.values
    if graph.specialised:
        return []
    inputs, moved = [clone.draw(seed) for seed in SEEDS], moved_parameters(graph, values)
    return [Point(graph, parameters, drawn) for parameters in (values, moved) for drawn in inputs]


def moved_parameters(graph: Graph, values: Values) -> Values:
    """Each floating-point parameter times 1.5: whatever is zero because two parameters cancel is not zero there."""
    return {n: 1.5 * t if n in graph.parameters and t.is_floating_point() else t for n, t in values.items()}


def multiplies_zeros(graph: Graph, name: str, points: Sequence[Point]) -> bool:
    """Whether everything that a parameter is multiplied with is exactly zero at all of these points."""

    def vanishes(reader: Node) -> bool:
        others = [other for other in reader.inputs if other != name]
        return reader.op in PRODUCTS and any(all(is_zero(point, other) for point in points) for other in others)

    readers = graph.users[name]
    return bool(readers) and bool(points) and all(map(vanishes, readers))


def is_zero(point: Point, name: str) -> bool:
    value = point.nodes[name]
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(value.any())


def in_words(prover: Prover, unknown: Unknown, points: Sequence[Point] = ()) -> str:
    """Why nothing is claimed of a parameter without a gradient, where the graph tells."""
    node = prover.graph.node_of.get(unknown.parameter)
    if "no gradient" not in unknown.why or node is None:
        return unknown.why
    if has_no_derivative(prover.graph, node):
        return CHOICE
    if multiplies_zeros(prover.graph, node, points):
        return ZEROS
    blocked = next((u for u in unknowns(prover) if u.parameter == unknown.parameter and u.blocked_by), None)
    return NO_REASON if blocked is None else f"no gradient; the proof stops at {blocked.blocked_by}: {blocked.why}"
